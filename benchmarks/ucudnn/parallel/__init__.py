"""Convolutions measured by several processes at a time, beside one process alone."""
