"""Arithmetic on tensors: noise, codecs, losses, updates, and the native kernels."""
