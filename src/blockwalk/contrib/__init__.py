"""Additions that the house carries but does not need: each registers its rows, and plugs into an
interface that anybody may use. This package's entry points name them, as any other's would. Who
looks after them, and when they go: README.md here."""
