"""Fifty steps under a budget, by an engine and by a loop after a finder of its size."""
