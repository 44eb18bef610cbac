"""What a training gains from BatchNorm of the whole batch, with its curves."""
