"""Leaves that no module lists, such as the parameters that a loss closes over: the graph has them.

They are found before the first backward of a signature, and from then on are treated as the model's
own: recorded, set aside, summed and delivered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from anybatch.core import modules
from anybatch.core.hooks import refuse_on_nodes, refuse_registered
from anybatch.core.transaction import Before
from anybatch.execution.step import Step


def discoverer(
    step: Step, before: Before, also: list[Tensor] | None = None
) -> Callable[[list[Tensor]], None]:
    """Return a function that adds the leaves behind a backward's roots, or refuses their hooks.

    Args:
        step: its gradients take them in.
        before: records their gradients.
        also: a list that they are added to; None (default) for none.
    """
    held = weakref.ref(step)  # which holds this function: in a circle its gradients would stay

    def discover(roots: list[Tensor]) -> None:
        step = held()
        if step is None or step.gradients is None:
            return
        listed = {id(leaf) for leaf in step.gradients.parameters} | step.own
        found = [leaf for leaf in modules.leaves(roots) if id(leaf) not in listed]
        before.add(found)
        step.gradients.add(found)
        # Hooks that forward registers, or that are on nodes, would fire with every micro-batch
        # (test_a_hook_on_the_node_of_a_gradient_is_refused).
        refuse_registered(step.gradients.parameters)
        refuse_on_nodes(modules.ends(roots))
        if also is not None:
            also.extend(found)

    return discover
