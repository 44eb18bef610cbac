"""Micro-Batch Streaming: what the core must show, against the loops people write."""
