"""Goals for more GPUs, parsed from a user's arguments, and the forecast that answers them.

A user's words and numbers are read here, once: a goal, a network, a training's length.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from numbers import Real
from operator import index
from typing import Any, Literal

import torch

from anybatch.core.plan import Plan
from anybatch.core.scale import Scale
from anybatch.core.units import parse_bandwidth
from anybatch.planner.choice import between
from anybatch.tools.costs import NetworkLink
from anybatch.tools.loaders import length_of
from anybatch.tools.profiled import Profile
from anybatch.tools.scaled import Goal, scaled


def goal_of(
    gpus: int | None,
    speedup: float | None,
    deadline: float | None,
    *,
    epochs: int = 1,
    loader: Any,
    network: str | None = None,
    servers: int | str | None = None,
) -> Goal:
    """Return the goal for more GPUs: a count, a speedup or a deadline.

    Args:
        gpus: as for `anybatch.plan`, and so are the others.
        speedup: over one.
        deadline: seconds.
        epochs: of the training.
        loader: of the training.
        network: as it was given.
        servers: as for `anybatch.plan`.

    Raises:
        ValueError: there are several goals, or one that means nothing, or no loader to measure by;
            or `servers` without `gpus` or without `network`.
    """
    goals = {"gpus": gpus, "speedup": speedup, "deadline": deadline}
    named = {name: value for name, value in goals.items() if value is not None}
    if len(named) > 1:
        raise ValueError(f"at most one goal can be given, and {sorted(named)} were: leave one")
    gpus = None if gpus is None else _count("gpus", gpus)
    speedup = None if speedup is None else _above_0("speedup", speedup)
    deadline = None if deadline is None else _above_0("deadline", deadline)
    epochs = _count("epochs", epochs)
    if network is not None:
        parse_bandwidth(network)
    requested = [*named, *([] if network is None else ["network"])]
    if servers is not None:
        requested.append("servers")
        if gpus is None or network is None:
            raise ValueError(
                "parameter servers are those of so many workers, whose traffic a network carries: "
                "give gpus= and network= with servers="
            )
    if loader is None and requested:
        raise ValueError(
            "the gain by more GPUs follows from steps of the real loop, and there is no loader "
            f"for {', '.join(requested)}: give loader="
        )
    steps = 0
    if deadline is not None:
        length = length_of(loader)
        if length is None:
            raise ValueError(
                "a deadline is for a number of steps, and the loader has no length: give a "
                "speedup instead"
            )
        steps = epochs * length
    return Goal(gpus, speedup, deadline, steps, _servers(servers))


def _servers(value: Any) -> int | Literal["auto"] | None:
    if isinstance(value, str) and value != "auto":
        raise ValueError(f'servers must be a whole number or "auto", and it is {value!r}')
    return value if value is None or value == "auto" else _count("servers", value)


def _count(name: str, value: Any) -> int:
    try:
        found = 0 if isinstance(value, bool) else index(value)
    except TypeError:
        found = 0
    if found < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, and it is {value!r}")
    return found


def _above_0(name: str, value: Any) -> float:
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not isfinite(value) or value <= 0:
        unit = " of seconds" if name == "deadline" else ""
        raise ValueError(f"{name} must be a number{unit} above 0, and it is {value!r}")
    return float(value)


def scale_of(
    plan: Plan,
    profile: Profile,
    optimizer: torch.optim.Optimizer,
    goal: Goal,
    network: str | None,
    size: int,
) -> Scale:
    """Return the forecast of a planned training on more GPUs.

    Args:
        plan: of its steps.
        profile: of some of them.
        optimizer: whose parameters' gradients are summed.
        goal: the goal.
        network: the network of the sums; None costs nothing.
        size: N_B, samples of the mini-batch that was planned.

    Raises:
        ValueError: there are fewer samples in a mini-batch than requested GPUs.
    """
    if goal.gpus is not None and goal.gpus > profile.samples:
        raise ValueError(
            f"gpus must be at most the {profile.samples} samples of a mini-batch, which they "
            f"share, and it is {goal.gpus}: ask for fewer, or give larger mini-batches"
        )
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    nbytes = sum(p.nbytes for p in parameters.values() if p.requires_grad)
    rows = () if plan.memory is None else plan.memory.candidates
    offloaded = plan.offload is not None
    measured = {
        one.micro_batch: one.seconds
        for one in rows
        if one.seconds is not None and one.offloaded == offloaded and one.micro_batch <= size
    }
    timed = of_micro_batches(measured, size)
    link = None if network is None else NetworkLink(parse_bandwidth(network))
    return scaled(profile, plan.micro_batch, timed, nbytes, link, goal)


def of_micro_batches(steps: Mapping[int, float], size: int) -> dict[int, float]:
    """Return the seconds of one micro-batch, from those of a step that it divides.

    A step consists of full micro-batches, and one of the rest, whose seconds are interpolated from
    smaller sizes (`anybatch.planner.choice.step_seconds`); so sizes are processed in rising order.

    Args:
        steps: samples in a micro-batch -> seconds of a step.
        size: N_B, samples of the step.
    """
    found: dict[int, float] = {}
    for n, seconds in sorted(steps.items()):
        count, rest = divmod(size, n)
        below = max(found, default=0)
        if not rest or rest in found or rest < below:
            smaller, weight = (between(found, rest) if rest else 0.0), 0.0
        elif found:  # on the line from the size below to this one
            weight = (rest - below) / (n - below)
            smaller = (1 - weight) * found[below]
        else:
            smaller, weight = 0.0, 1.0
        found[n] = max(0.0, seconds - smaller) / (count + weight)
    return {n: seconds for n, seconds in found.items() if seconds > 0}
