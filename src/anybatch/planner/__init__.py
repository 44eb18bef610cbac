"""From a budget to a plan: a dry run, a forecast of every size, and the fastest that fits.

This folder knows steps as far as they can be run without data. It knows no engine.

Read `rehearse` (a dry run), `forecast` (bytes for every size), `ladder` (how it is made),
`resident`, `offloaded` and `paged_lockstep` (all tensors resident, saved tensors offloaded, lanes
paged between kernels), `choice` and `duel` (timing), `decision`, `planner`.
"""
