"""The command `anybatch`: options, data, models, training, run folders, reports.

Nothing outside this folder imports it.

Read `cli` (the commands), `settings`, `build` (model, data and engine), `train`, `run` and
`run_folder`, `summary`, and the folder `report`.
"""
