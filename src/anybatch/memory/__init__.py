"""Live bytes and their owners: ledgers, a meter, limits, stores and the pager.

This folder knows tensors, storages and plans. It knows no loss, no mechanism and no planner.

Read `timeline` and `step_timeline` (live bytes by event and owner), `meter` (the dispatch mode that
counts them), `fakes` (a model without data), `limits` (the memory that a process may take),
`stores` (host and file), then `pager` with `hold`, `copier` and `paging`: storages of lanes that
wait.
"""
