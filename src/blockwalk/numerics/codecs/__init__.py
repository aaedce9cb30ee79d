"""Codecs: how a matrix's elements are written, and how they are read a range at a time."""
