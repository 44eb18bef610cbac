"""The command `anybatch`: options, data, models, training, run folders, reports.

Nothing outside this folder imports it, and it imports public names only: those of `anybatch` and of
the modules beside the folders.

Read `cli` (the commands), `options`, `settings`, `build` (model, data and engine), `train`,
`planned` (the plan of a run), `run`, `run_folder`, `saved_run`, `team` (several processes),
`outcome` (exit codes), and the folders `models` and `report`.
"""
