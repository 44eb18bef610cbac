"""Law 1: the gradient of every case and split against the undivided batch."""
