"""Whether samples meet: shown without tolerance, on a few rows, before a batch is split.

Equal outputs at two sizes are no proof: a gate of 0 hides everything behind it, float32 needs a
tolerance, and draws cannot be compared at all. Here every number of a few rows carries the set of
samples that contributed to it, through every kernel, with the real values.

This folder knows kernels, tensors and modules. It knows no engine, no plan and no mechanism.

Read `masks` (the sets, and their storage), `rules` (their change by a kernel), `places` (numbers
that belong to no sample), `follow` (the mode that intercepts every kernel), `verdict` (the
conclusion), `halves` (gradients of a few rows in one micro-batch and in two), `declared` (a loss
declared to be a sum over samples), `congruent` (the kernels of the full batch against those of a
micro-batch), `familiar` (models that change in later steps), `anybatch.core.evidence` (the words of
a plan for it).
"""
