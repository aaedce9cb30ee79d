"""Cutting a transformers model into units without code for the model."""

from blockwalk.system import kernel_notes

kernel_notes.silence()  # PEFT is imported here, and in what imports this
