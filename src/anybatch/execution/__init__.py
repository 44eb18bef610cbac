"""One step: its gradient by one of the mechanisms, and the way back where it fails.

This folder uses the batch, the loss, ranks and offloading. It does not use the planner: how a batch
is run is an argument. Lockstep has a folder of its own.

Read `step` (the parts of a step), `undivided`, `stream` (micro-batches one after another),
`gather`, `first_pass` and `second_pass` (a loss that couples samples), `gradients`, `retry` (out of
memory), `inspection` (a few rows before a batch is split), the folders `proof` (whether samples
meet) and `full_batch_rng` (draws of the full batch).
"""
