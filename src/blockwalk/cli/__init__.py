"""The subcommands of :mod:`blockwalk.cli.main`: each is a function that answers its exit code, or
None for 0."""
