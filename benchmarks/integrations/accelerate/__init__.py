"""accelerate's own accumulation beside an engine."""
