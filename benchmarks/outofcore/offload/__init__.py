"""A person's own step in memory, and with what autograd saves on disk or on the host."""
