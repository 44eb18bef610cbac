"""nnU-Net's own trainer beside `AnyBatchTrainer`: the gradient of a step, on many plans."""
