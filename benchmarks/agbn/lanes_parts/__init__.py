"""Where the time of a step in lanes goes."""
