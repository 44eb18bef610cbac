"""State of an optimizer that waits elsewhere between its steps, and parameters with it.

This folder knows optimizers and stores. It knows no engine.

Read `seams` (where an optimizer is entered), `keeper` (who has what), `away` (what stands in its
place), `stepping` (a step part by part) and `paging` (parameters).
"""
