"""Micro-batches in lockstep: lanes, BatchNorm of the full batch, coupled functions.

This folder knows a step and the pager. It knows no planner.

Read `scheduler` (threads, one of which runs, and the state of each), `lockstep` (a step in lanes),
`batchnorm` (statistics of the full batch, forward and backward), `sync_batchnorm` (BatchNorm over
processes), `coupled`, `captured` and `gathered` (functions of all samples), `shared_state` (what
lanes must not share).
"""
