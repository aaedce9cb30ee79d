"""Streaming a model into another folder: merged with an adapter, or replayed from a ledger."""
