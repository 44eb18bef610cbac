"""The batch over several processes: a handshake for each step, sums over ranks, shards.

This folder knows process groups, gradients and rows. It knows no mechanism and no planner.

Read `process_group` (collectives that end), `local_batch` (the answers of a single process),
`global_batch` (the same by collectives), `coordinator` and `handshake` (the beginning of a step),
`buckets` and `gradients` (sums of gradients in pieces) and `fsdp` (parameters in shards).
"""
