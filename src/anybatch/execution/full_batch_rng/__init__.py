"""Full-batch draws: every micro-batch gets its rows of the undivided batch's draws.

This folder knows kernels that draw, and call sites. It knows no plan.

Read `law` and `site` (layout and call site of a draw), `mode` (the mode that draws), `kernels`,
`learn` and `trial` (a layout that is found by trial), `refuse`.
"""
