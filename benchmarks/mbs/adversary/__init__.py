"""Models and losses that couple samples, hidden on purpose, beside honest twins."""
