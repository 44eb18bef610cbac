"""The seven steps of a training loop: what each takes, what is hidden, and what to do about it."""
