"""BatchNorm as every part of the library sees it: where it is called, and its moments.

This folder knows modules and reductions over micro-batches; it knows no step and no lanes.

Read `intercept` (the override of torch's call), `sites` (the calls of a forward, in order),
`moments` (mean and variance of parts, merged), `non_reducing` (the layer without statistics of a
batch, for a dry run) and `counters` (modules that count their batches).
"""
