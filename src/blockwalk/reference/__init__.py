"""The oracle: naive whole-model loops in memory, kept short. Whatever the plan, the numbers must be
these."""
