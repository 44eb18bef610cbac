"""One step: its gradient by one of the mechanisms, and the way back where it fails.

This folder uses the batch, the loss, ranks and offloading. It does not use the planner: how a batch
is run is an argument. Lockstep has a folder of its own.

Read `step` (the parts of a step), `streaming` (micro-batches one after another, the retry after out
of memory), `two_pass` (a loss that couples samples), `gradients`, `signature` (a batch's signature,
and its description for a dry run), `attempts` (an attempt, repeated in smaller parts; `anybatch.core.transaction` undoes a step), `few_rows` and
`inspection` (a few rows before a batch is split), `full_size` (the full batch beside them, without
data), the folders `proof` (whether samples meet) and `full_batch_rng` (draws of
the full batch).
"""
