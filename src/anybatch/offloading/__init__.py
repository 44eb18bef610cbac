"""Memory of one micro-batch that waits elsewhere: saved tensors, optimizer state, parameters.

This folder knows traces, stores and autograd's saved tensors. It knows no loss and no planner.

Read `schedule` (a step as data: trace, schedule, simulation), `policy` (which variables leave, and
when), `recorder` (a step is recorded), `course` (the plan of a recorded step) with `unroll` (its
timeline), `mover` (saved tensors that leave and return), `recompute` (saved tensors that are
computed again), `saved_tensors` (the hooks of a step) and `offload` (the public call). The
optimizer's state: `state_mover` and `optimizer_states`; with the parameters: `parameters` and
`planned_states`. All of them copy by `anybatch.memory.pager`, where memory is given up
(``Copies.empty``).
"""
