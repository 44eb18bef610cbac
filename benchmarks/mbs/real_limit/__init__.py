"""A training under a real limit on memory: the undivided batch dies, and what does not."""
