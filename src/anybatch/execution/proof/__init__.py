"""Whether samples meet: shown without tolerance, on a few rows, before a batch is split.

Outputs that look alike at two sizes are no proof: a gate of 0 hides what is behind it, float32
allows for a difference, and draws allow none at all. Here every number of a few rows carries the
set of samples that have had a part in it, through every kernel, beside the real values.

This folder knows kernels, tensors and modules. It knows no engine, no plan and no mechanism.

Read `masks` (the sets, and where they are kept), `rules` (what a kernel does to them), `places`
(numbers that belong to no sample), `follow` (the mode that sees every kernel), `verdict` (what is
concluded), `halves` (gradients of a few rows in one micro-batch and in two), `declared` (a loss
that is said to be of single samples), `congruent` (the kernels of the full batch beside those of a
micro-batch), `familiar` (models that change in later steps), `anybatch.core.evidence` (the words of
a plan for it).
"""
