"""Half precision: the gradient over 2048 micro-batches of a bfloat16 model."""
