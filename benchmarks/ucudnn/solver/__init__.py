"""How long it takes to divide a network's workspace."""
