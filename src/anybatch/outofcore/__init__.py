"""Training with less memory than one micro-batch needs: traces, schedules, and their simulation."""
