"""Benchmarks of BatchNorm over micro-batches and ranks."""
