"""What the guide prints, beside what its equations give."""
