"""Programs: a plan compiled for a model into a list of operations. No torch."""
