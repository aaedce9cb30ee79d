"""Noise as a function of a key: the same bits on any tier, device and rank."""
