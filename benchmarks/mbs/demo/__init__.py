"""`make demo`: a real training in under three minutes."""
