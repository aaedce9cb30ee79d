"""The subcommands of :mod:`blockwalk.cli.commands`: each is a function that answers its exit
code, or None for 0."""
