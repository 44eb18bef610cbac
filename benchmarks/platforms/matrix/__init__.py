"""Versions of Python and torch, and how many tests passed with each: `make matrix` writes it."""
