"""README: a model sharded by fully_shard trains on the batch of all ranks."""
