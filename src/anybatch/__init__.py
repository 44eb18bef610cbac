"""Any batch size, in the memory you have, with the gradient of the whole batch."""
