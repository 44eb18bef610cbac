"""What a person wants of more GPUs, and what a plan answers.

Words and numbers of a person are read here, once: a goal, a network, a training's length.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch

from anybatch._plan import Plan
from anybatch._scale import Scale
from anybatch.profiling.profiled import Profile
from anybatch.scale.costs import Link
from anybatch.scaled import Goal, scaled
from anybatch.units import parse_bandwidth


def goal_of(
    gpus: int | None,
    speedup: float | None,
    deadline: float | None,
    *,
    epochs: int = 1,
    loader: Any,
    network: str | None = None,
) -> Goal:
    """Return what is wanted of more GPUs.

    Args:
        gpus: as for `anybatch.plan`, and so are the others.
        speedup: over one.
        deadline: seconds.
        epochs: of the training.
        loader: of the training.
        network: as it was given.

    Raises:
        ValueError: there are several goals, or one that means nothing, or no loader to measure by.
    """
    given = {"gpus": gpus, "speedup": speedup, "deadline": deadline}
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        raise ValueError(f"at most one goal can be reached, and {sorted(named)} came: leave one")
    for name, value in {**named, "epochs": epochs}.items():
        if (
            not isfinite(value)
            or value <= 0
            or (name in ("gpus", "epochs") and value != int(value))
        ):
            kind = "a whole number of at least 1" if name in ("gpus", "epochs") else "above 0"
            raise ValueError(f"{name} must be {kind}, and it is {value!r}")
    if network is not None:
        parse_bandwidth(network)
    asked = [*named, *([] if network is None else ["network"])]
    if loader is None and asked:
        raise ValueError(
            "what more GPUs bring follows from steps of the real loop, and there is no loader for "
            f"{', '.join(asked)}: give loader="
        )
    steps = 0
    if deadline is not None:
        if not hasattr(loader, "__len__"):
            raise ValueError(
                "a deadline is for a number of steps, and the loader does not know its length: "
                "give a speedup instead"
            )
        steps = epochs * len(loader)
    return Goal(gpus, speedup, deadline, steps)


def scale_of(
    plan: Plan,
    profile: Profile,
    optimizer: torch.optim.Optimizer,
    goal: Goal,
    network: str | None,
) -> Scale:
    """Return what more GPUs would make of a training.

    Args:
        plan: of its steps.
        profile: of some of them.
        optimizer: whose parameters' gradients are summed.
        goal: what is wanted.
        network: what carries them; None costs nothing.
    """
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    size = sum(p.nbytes for p in parameters.values() if p.requires_grad)
    rows = () if plan.memory is None else plan.memory.candidates
    away = plan.offload is not None
    timed = {
        one.micro_batch: one.seconds * one.micro_batch / profile.samples
        for one in rows
        if one.seconds is not None and one.away == away and one.micro_batch <= profile.samples
    }
    link = None if network is None else Link(parse_bandwidth(network))
    return scaled(profile, plan.micro_batch, timed, size, link, goal)
