"""Memory of one micro-batch that waits elsewhere: saved tensors, optimizer state, parameters.

This folder knows traces, stores and autograd's saved tensors. It knows no loss and no planner.

Read `trace` and `schedule` (a step as data, and its evictions and prefetches), `simulate`,
`belady`, `fit`, then `saved` and `mover` (offloaded saved tensors), `watch` (the recorder),
`keeping` (the micro-batches of a step), `offload` (the public call) and the folder `states`.
"""
