"""Benchmarks: every figure of README and docs comes from a results.json made here."""
