"""Simulations that reproduce a figure of a paper and that no step needs."""
