"""Process groups, agreement between ranks, their watch and their start."""
