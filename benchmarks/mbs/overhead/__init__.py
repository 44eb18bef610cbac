"""What a step costs beside forward and backward."""
