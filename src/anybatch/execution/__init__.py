"""One step: its gradient by one of the mechanisms, and the way back where it fails.

This folder uses the batch, the loss, ranks and offloading. It does not use the planner: how a batch
is run is an argument. Lockstep has a folder of its own.

Read `step` (the parts of a step), `streaming` (micro-batches one after another, the retry after out
of memory), `two_pass` (a loss that couples samples), `gradients`, `buffers` (moved once for all
micro-batches), `prefetch` (micro-batches on their way to the device), `signature` (a batch's
signature, and its description for a dry run), `traits` (findings of earlier steps), `attempts` (an
attempt, repeated in smaller parts; `anybatch.core.transaction` undoes a step), `few_rows`, `guard`
and `inspection` (a few rows before a batch is split), `outside` (numbers and functions that forward
reads), `collated` (rows of a ``collate_fn``), `single_sample` (errors of one row), `strides` (a
fault of torch's with one row), `tiles` (modules of single tokens in tiles), `full_size` (the full
batch beside few rows, without data), `composite` (encoders that do not meet before the loss), and
the folders `proof` (whether samples meet) and `full_batch_rng` (draws of the full batch).
"""
