"""`Engine`, and the modules that run its steps.

This folder uses all folders below it, and is used by the tools, the integrations and the command.

Read `engine` (the public class), `inputs` (its inputs), `executor` (one step), `step_builder` (a
step's parts), `measurement` (its bytes, and lessons of the planner), `rank_session` (the ranks of a
step) and `resume` (the state in a checkpoint).
"""
