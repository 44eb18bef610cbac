"""Micro-batches in lockstep: lanes, BatchNorm of the full batch, coupled functions.

This folder knows a step and the pager. It knows no planner.

Read `lanes` (threads, one of which runs), `lockstep` (a step in lanes), `slots` (state of modules
by lane), `batchnorm` (statistics of the full batch, forward and backward), `ranks` and `adaptive`
(BatchNorm over processes), `coupled` and `gathered` (functions of all samples).
"""
