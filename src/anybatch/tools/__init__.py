"""Questions about a training: check, plan, profile, and how far it scales.

This folder asks an engine. No part of a step knows it.

Read `check` and `diagnose`, `planning`, `profile` with `profiled`, then `scaled` and `gpus` (the
lemmas of Zou et al.).
"""
