"""Live bytes and their owners: ledgers, a meter, limits, stores and the pager.

This folder knows tensors, storages and plans. It knows no loss, no mechanism and no planner.

Read `ledger` (live bytes by event and owner), `meter` (the dispatch mode that counts them), `fakes`
and `fake_values` (a model without data, and numbers that a package reads of it), `limits` (the
memory that a process may take), `stores` and `spill` (host and file, and which of them), `pager`
(pages of any owner: their copies, table and eviction), then `lane_pager` with `lockstep_budget`:
storages of lanes that wait.
"""
