"""What a GPU has seen: tests, honest networks and the adversary; `make gpu-check` writes it."""
