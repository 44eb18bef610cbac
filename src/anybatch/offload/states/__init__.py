"""State of an optimizer that waits elsewhere between its steps, and parameters with it.

This folder knows optimizers and stores. It knows no engine.

Read `seams` (where an optimizer is entered), `state_mover` (what is where), `placeholder` (what
stands in place of an offloaded tensor), `stepping` (a step part by part) and `paging` (parameters).
"""
