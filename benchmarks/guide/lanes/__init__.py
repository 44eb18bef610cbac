"""What a plan foresees of steps in lanes, and what they hold."""
