"""TRL's trainers, with its own gradient accumulation and with an engine."""
