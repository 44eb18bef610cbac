"""Figures 2 and 3 of the guide: throughput and convergence by mini-batch."""
