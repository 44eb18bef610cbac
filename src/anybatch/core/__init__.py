"""Words that every part of the library uses: batches, trees, modules, random states, plans, errors.

This folder knows torch and nothing else of the library. It knows no loss, no step and no engine.

Read `anybatch.errors` and `units` first, then `batch` (a mini-batch and its micro-batches),
`pytree` (tensors in nested containers), `modules` (a walk through a model, its autograd graph),
`rng` (states of the generators), `plan` and `plan_sections` (the data that a step obeys), `barrier`
(a reduction over micro-batches that wait for each other), `norm` with `moments` (every batch
normalisation of a model), `reached` (what a callable holds and names), `transaction` with
`python_state` (a snapshot of a step, and its restore) and `accelerator` (the only file that names a
type of device).
"""
