"""The state that a walk works on, bound to its tiers."""
