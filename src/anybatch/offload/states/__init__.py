"""State of an optimizer that waits elsewhere between its steps, and parameters with it.

This folder knows optimizers and stores. It knows no engine.

Read `seams` (hooks into an optimizer), `state_mover` (locations of tensors), `placeholder` (in
place of an offloaded tensor), `stepping` (a step part by part) and `paging` (parameters).
"""
