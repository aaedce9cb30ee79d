"""The directions of a step: backpropagation by blocks, and zeroth order."""
