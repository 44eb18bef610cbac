"""Losses that people write themselves: one pass, beside the best loop by hand and two passes."""
