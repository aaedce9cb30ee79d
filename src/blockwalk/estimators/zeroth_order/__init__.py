"""Zeroth order: directions from forward passes alone."""
