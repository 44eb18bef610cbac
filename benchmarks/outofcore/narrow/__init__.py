"""How little is enough for a batch with BatchNorm, and what it takes."""
