"""Full-batch draws: every micro-batch gets its rows of the undivided batch's draws.

This folder knows kernels that draw, and call sites. It knows no plan.

Read `law` (the layout of a draw), `mode` (the mode that draws, and the site of a draw), `kernels`
(each kernel that draws, and the refusals), `draw_layout` (a layout that is found by trial).
"""
