"""The dice of the whole batch: every micro-batch draws what the undivided batch would for it."""
