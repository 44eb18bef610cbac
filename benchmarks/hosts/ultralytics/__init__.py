"""Networks and losses of ultralytics: its own accumulation and ours beside the undivided batch."""
