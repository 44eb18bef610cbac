"""Benchmark of the package as it is installed: sizes, and seconds until it can be used."""
