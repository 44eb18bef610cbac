"""Questions about a training: check, plan, profile, and how far it scales.

This folder asks an engine. No part of a step knows it.

Read `exactness` (the one measure of an error), `check` and `diagnose`, `planning` with `autocast`
(of a CUDA device that is not here), `why` (a plan beside other ways), `profile` with `profiled`,
then `scaled` and `gpus` (the lemmas of Zou et al.).
"""
