"""Ranks that join and leave a zeroth-order run while it goes on (``elastic``)."""
