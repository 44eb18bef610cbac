"""A person's own step in memory, and with cheap results computed again."""
