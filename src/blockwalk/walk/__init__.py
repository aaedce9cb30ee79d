"""The walker, which executes programs on this machine, and what it measures of units."""
