"""What the subcommands of :mod:`blockwalk.cli` do. Each function answers its exit code."""
