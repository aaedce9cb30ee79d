"""Additions for users of other engines; nothing in the house imports them."""
