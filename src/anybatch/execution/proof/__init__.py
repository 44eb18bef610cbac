"""Proof that samples do not meet, without tolerance, on a few rows, before a batch is split.

Equal outputs at two sizes are no proof: a gate of 0 hides everything behind it, float32 needs a
tolerance, and draws cannot be compared at all. Here every number of a few rows carries the set of
samples that contributed to it, through every kernel, with the real values.

This folder knows kernels, tensors and modules. It knows no engine, no plan and no mechanism.

Read `masks` (the sets, and where they are kept), `law` (sizes that follow the number of samples),
`kernel_call` (a call, its views, and the table of rules), `rules`, `rules_places` and
`rules_products` (the masks of a kernel's results), `kernel_probe` (a kernel without a rule),
`places` (numbers that belong to no sample), `follow` (the mode that sees every kernel) and its
`notes`, `rows` (a few rows of a batch are run), `verdict` (the conclusion), `declared` (a loss that
is said to be of single samples), `congruent` (the kernels of the full batch beside those of a
micro-batch), `stored_samples` and `inspected` (models that change in later steps). The words of a
plan for it are `Evidence` in `anybatch.core.plan_sections`.
"""
