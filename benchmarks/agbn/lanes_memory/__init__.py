"""What a step in lanes holds."""
