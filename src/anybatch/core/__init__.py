"""Words that every part of the library uses: batches, trees, modules, random states, plans, errors.

This folder knows torch and nothing else of the library. It knows no loss, no step and no engine.

Read `anybatch.errors` and `units` first, then `batch` (a mini-batch and its micro-batches), `tree`
(tensors in nested containers), `modules` (a walk through a model), `rng` (states of the
generators), `plan` (the data that a step obeys), `meeting` (a reduction over micro-batches that
wait for each other), `undo` with `python_state` (a snapshot, and
putting it back) and `accelerator` (the
only file that names a type of device).
"""
