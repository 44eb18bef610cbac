"""What the one sum of gradients takes of a step, and what hiding it behind backward gives back."""
