"""Tiny Recursive Models: a small network that reasons by applying itself to its own answer."""
