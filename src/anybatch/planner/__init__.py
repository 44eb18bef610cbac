"""From a budget to a plan: a dry run, a forecast of every size, and the fastest that fits.

This folder knows steps as far as they can be run without data. It knows no engine.

In all of its files `n` is the samples in a micro-batch, `size` is N_B, those in the mini-batch, and
memory is in bytes. `case` is that of a dry run: fakes, or the real rows. `inspection` has the
findings of the first inspection, and `limit` the bytes at which a dry run stops with
torch.OutOfMemoryError; None (default) is any number of them.

Read `rehearsal` (a dry run) and `probe` (a real micro-batch, and an optimizer's update), `forecast`
(bytes for every size), `full_batch` (those of an undivided step only), `ladder` (how both are
made), `budget` (the bytes that a step may hold), `memory_model` and its three, which choose a size
or refuse a budget: `resident_memory`, `offload_memory` and `paged_lockstep` with `working_set` (all
tensors resident, saved tensors offloaded, lanes paged between kernels), `workspaces` (of
convolutions), `search` (the fastest of these, by steps that train), `earlier_plans` (those of the
starts before), `decision`, `ways` (chunks of wide maps and tiles of tokens), `planner`.
"""
