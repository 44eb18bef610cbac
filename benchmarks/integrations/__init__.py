"""Benchmarks of the integrations, each beside the trainer it stands in for."""
