"""Live bytes over one step: undivided, streamed, in lanes, and with tensors away."""
