"""One step: how it is run, and how it is undone."""
