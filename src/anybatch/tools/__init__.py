"""Questions about a training: check, plan, profile, and how far it scales.

This folder asks an engine. No part of a step knows it.

Read `check` and `diagnose`, `planning` and `question`, `profile` with `profiled` and `stages`, then
`scaled`, `gpus`, `loop` and `servers` (the lemmas of Zou et al.).
"""
