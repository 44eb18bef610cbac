"""BatchNorm over all of a batch: in micro-batches that wait for each other, and over ranks."""
