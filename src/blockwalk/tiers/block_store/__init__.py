"""The block store: a model's parameters encoded in one file a unit's section."""
