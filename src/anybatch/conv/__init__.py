"""Convolutions under a workspace limit: which algorithm, and how many samples at a time."""
