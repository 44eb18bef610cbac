"""Peak memory of a step against the batch size."""
