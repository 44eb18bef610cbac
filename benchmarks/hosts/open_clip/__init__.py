"""open_clip: its training script's accumulation and an engine beside the undivided batch."""
