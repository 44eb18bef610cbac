"""Convolutions under a workspace limit: which algorithm, and how many samples at a time (u-cuDNN).

This folder knows kernels and their workspaces. It knows no step and no engine.

Read `problem` (a convolution as numbers), `algorithms` (programs that compute it; `fourier` and
`circles` are the fast transforms), `measure` (their seconds, measured and stored) and `warm`
(before a training), `divide` (WR and WD), `chooser`, `dispatch` (the override of aten) and
`convolutions` (the public call).
"""
