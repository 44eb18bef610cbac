"""Modules that act on each token by itself, in tiles of tokens."""
