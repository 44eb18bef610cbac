"""Blocks that are computed again, beside checkpoints by hand."""
