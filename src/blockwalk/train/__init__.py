"""A run from its YAML file to its saved model."""
