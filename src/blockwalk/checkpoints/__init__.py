"""Saved training state and the ledger of a zeroth-order run."""
