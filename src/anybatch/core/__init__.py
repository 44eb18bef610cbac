"""Words that every part of the library uses: batches, trees, modules, random states, plans, errors.

This folder knows torch and nothing else of the library. It knows no loss, no step and no engine.

Read `anybatch.errors` and `units` first (bytes and seconds as people write them), then `batch` (a
mini-batch and its micro-batches), `pytree` (tensors in nested containers), `modules` (a walk
through a model, its autograd graph), `optimizers` (their state, and a step of some parameters),
`rng` (states of the generators), `plan` and `plan_sections` (the data that a step obeys), `barrier`
(a reduction over micro-batches that wait for each other), `norm` with `moments` (every batch
normalisation of a model), `retry` (the only loop that runs a step again), `transaction` with
`python_state` (a snapshot of a step, and its restore), `reached` (values that a callable holds and
names), `hooks` (on parameters, once a step), `oom` (errors of memory that ran out), `threads`,
`status` (one line while something lasts) and `lazy` (public names that are imported late).

Devices: `accelerator` is the only file that names a type of device, beside `absent` (a device that
is planned for and is not here); `accelerators` asks all of this process together.
"""
