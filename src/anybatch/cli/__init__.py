"""The command `anybatch`: options, data, models, training, run folders, reports.

Nothing outside this folder imports it, and it imports public names only: those of `anybatch` and of
the modules beside the folders.

Read `cli` (the commands), `settings`, `build` (model, data and engine), `train`, `run`,
`run_folder`, `saved_run`, and the folder `report`.
"""
