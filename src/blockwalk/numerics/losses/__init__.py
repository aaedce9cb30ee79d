"""Losses that add up over tokens: each from hidden states and the head, never from all logits."""
