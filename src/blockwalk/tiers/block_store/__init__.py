"""The block store: a model folder with one file for each unit, its parameters encoded."""
