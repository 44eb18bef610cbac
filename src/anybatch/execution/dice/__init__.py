"""Random draws of the full batch: every micro-batch draws what the undivided batch would for it.

This folder knows kernels that draw, and call sites. It knows no plan.

Read `law` and `site` (the layout of a draw), `whole` (the mode that draws), `kernels`, `learn` and
`trial` (a layout that is found by trial), `refuse`.
"""
