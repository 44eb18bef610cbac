"""Convolutions under a workspace limit: which algorithm, and how many samples at a time (u-cuDNN).

This folder knows kernels and their workspaces. It knows no step and no engine.

Read `problem` (a convolution as numbers), `algorithms` (for computing it), `search` and `costs`
(their seconds, measured and stored), `divide` (WR and WD), `chooser`, `intercept` (the override of
aten) and `convolutions` (the public call).
"""
