"""Which micro-batch: the finders people use, against a full sweep."""
