"""The batch over several processes: a handshake for each step, sums over ranks, shards.

This folder knows process groups, gradients and rows. It knows no mechanism and no planner.

Read `group` (collectives that end), `local_batch` (one process), `ranks` (the same by collectives),
`coordinator` and `beginning` (the handshake of a step), `pieces` (gradients in pieces) and
`sharded` (parameters in shards).
"""
