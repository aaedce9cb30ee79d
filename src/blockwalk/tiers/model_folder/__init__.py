"""Checkpoint folders as transformers writes them."""
