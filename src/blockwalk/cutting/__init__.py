"""Cutting a transformers model into units without code for the model."""
