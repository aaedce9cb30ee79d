"""What the subcommands of :mod:`blockwalk.cli.main` do. Each function answers its exit code."""
