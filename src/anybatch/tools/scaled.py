"""Forecast of a training on more GPUs and parameter servers, for the goals of a user.

A user's words and numbers are read here, once: a goal, a network, a training's length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, isfinite
from numbers import Real
from operator import index
from typing import Any, Literal

import torch

from anybatch.core.plan import Plan
from anybatch.core.plan_sections import ParameterServers, Scale, ScaleRow
from anybatch.core.units import parse_bandwidth, show_seconds
from anybatch.tools.gpus import (
    ROUNDING,
    GradientSum,
    Loop,
    Measured,
    Needed,
    NetworkLink,
    Work,
    between,
    positive,
    speedup,
    step_seconds,
)
from anybatch.tools.profile import length_of
from anybatch.tools.profiled import COMPUTE, LOAD, PREPARE, TRANSFER, UPDATE, LoopStage, Profile


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
    smaller sizes (`anybatch.tools.gpus.step_seconds`); so sizes are processed in rising order.

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


# Forecast of a training on more GPUs, from profiled steps and timed sizes of one.
#
#     seconds of micro-batches ─┐
#     profiled steps ───────────┼──> loop (`anybatch.tools.gpus`) ──> T(G) ──> table, goal
#     bytes of gradients, link ─┘
#
# Computing on a share of the mini-batch is that of its micro-batches; the wait for storage is
# constant, and preparation is divided, since each rank prepares its own share.
#
# Source: Zou et al. (the guide), section 3.2, Lemma 3.1.

MOST = 8
"""GPUs of the table where no goal asks for more."""

AS_PARTS = "a share of a mini-batch takes its part of the seconds: no sizes were timed"
FREE = "summing gradients costs nothing: name the network to count it"
SERVED = (
    "servers hold even parts of the parameters, each machine's link is the network's, and no "
    "transfer queues; a gradient is of parameters that other workers have changed since: anybatch "
    "does not train so"
)
SHARED = "storage is shared by all, and each GPU has as many cores to prepare samples as here"


@dataclass(frozen=True)
class Goal:
    """Goal for more GPUs: a count, a speedup or a deadline, at most one of the three.

    Attributes:
        gpus: so many.
        speedup: so many times as fast as one.
        deadline: seconds, for so many `steps`.
        steps: of the full training.
        servers: parameter servers of `gpus` workers that do not wait for each other, or "auto" for
            the fewest that hide their traffic; None (default) for none.
    """

    gpus: int | None = None
    speedup: float | None = None
    deadline: float | None = None
    steps: int = 0
    servers: int | Literal["auto"] | None = None

    def answer(self, loop: Loop) -> tuple[int | None, str]:
        """Return the GPUs that it takes, None where none do, and the goal in words."""
        if self.gpus is not None:
            return self.gpus, f"{self.gpus} GPUs, as requested"
        if self.speedup is not None:
            return _said(loop.gpus_for(self.speedup), f"{self.speedup:g} times as fast")
        if self.deadline is not None:
            needed = loop.gpus_by(self.deadline, steps=self.steps)
            return _said(needed, f"{self.steps} steps in {show_seconds(self.deadline)}")
        return None, ""


def _said(needed: Needed, goal: str) -> tuple[int | None, str]:
    return needed.gpus, f"{goal}: {needed}"


def scaled(
    profile: Profile,
    micro_batch: int,
    timed: Mapping[int, float],
    gradient_bytes: int,
    link: NetworkLink | None,
    goal: Goal,
) -> Scale:
    """Return the forecast of a profiled training on more GPUs.

    Args:
        profile: of its steps on one.
        micro_batch: samples, as planned.
        timed: samples -> seconds of a micro-batch, as far as they were timed; may be empty.
        gradient_bytes: of all parameters.
        link: between GPUs; None costs nothing.
        goal: the goal.
    """
    loop = loop_of(profile, micro_batch, timed, gradient_bytes, link)
    gpus, words = goal.answer(loop)
    most = min(profile.samples, max(MOST, 2 * (gpus or 0)))
    shown = sorted({g for g in (1, 2, 3, 4, 6, 8, 12, 16, gpus or 1, most) if g <= most})
    single, end = loop.seconds(1), loop.saturation()
    rows = []
    for count in shown:
        seconds, lemma = loop.seconds(count), speedup(profile.overhead, count)
        rows.append(ScaleRow(count, seconds, single / seconds, single / seconds / count, lemma))
    assumed = [SHARED, *([] if link else [FREE]), *([] if micro_batch in timed else [AS_PARTS])]
    served = None
    if goal.servers is not None and goal.gpus is not None and link is not None:
        assumed.append(SERVED)
        compute = loop.compute.seconds(profile.samples)
        served = _served(goal.servers, goal.gpus, compute, gradient_bytes, link)
    return Scale(tuple(rows), gpus, words, end.worth, end.fastest, tuple(assumed), served)


def _served(
    servers: int | Literal["auto"], workers: int, compute: float, nbytes: int, link: NetworkLink
) -> ParameterServers:
    """Return the parameter servers of workers that each compute a full mini-batch in a round.

    In it a worker pulls all parameters and pushes all updates, 2 S_p bytes over its own link, and
    the servers divide the traffic of all workers: hidden as long as T_C >= 2 S_p N_w / (N_ps B_ps).

    Source: guide, Lemma 3.2. More of it, and its oracle: `benchmarks.simulators.parameter_servers`.
    """
    positive(compute=compute, parameters=nbytes)
    own, available = 2 * nbytes / link.bandwidth, compute * (1 + ROUNDING)
    enough, reason = None, f"a worker's own link needs {own:.3g} s a round"
    if own <= available:
        every = 2 * nbytes * workers / link.bandwidth
        enough, reason = max(1, ceil(every / available * (1 - ROUNDING))), ""
    count = enough if servers == "auto" else servers
    shared = 0.0 if count is None else 2 * nbytes * workers * (1 / count) / link.bandwidth
    return ParameterServers(workers, count, enough, max(own, shared) / compute, reason)


def loop_of(
    profile: Profile,
    micro_batch: int,
    timed: Mapping[int, float],
    gradient_bytes: int,
    link: NetworkLink | None,
) -> Loop:
    """Return the loop as one GPU runs it; the arguments are those of `scaled`."""
    stages = {one.name: one for one in profile.stages}
    load, prepare = stages[LOAD], stages[PREPARE]
    computing, update = stages[COMPUTE].shows, stages[UPDATE].shows
    copies = stages[TRANSFER].shows
    work, hidden = Work(load.shows + copies, prepare.shows), Work()
    if profile.workers:
        work, hidden = _hidden(load, prepare, profile.workers, computing + update + copies)
        work = Work(work.serial + copies, work.parallel)
    return Loop(
        samples=profile.samples,
        compute=_computing(computing, profile.samples, micro_batch, timed),
        work=work,
        hidden=hidden,
        update=update,
        gradients=None if link is None else GradientSum(gradient_bytes, link),
    )


def _hidden(load: LoopStage, prepare: LoopStage, workers: int, rest: float) -> tuple[Work, Work]:
    """Return the loading that waits and the loading hidden by workers, fitted to one GPU's seconds.

    Args:
        load: waiting for the storage.
        prepare: on a core.
        workers: that share both.
        rest: seconds of a step without loading.
    """
    takes, shows = (load.takes + prepare.takes) / workers, load.shows + prepare.shows
    hidden = Work(load.takes / workers, prepare.takes / workers)
    if takes <= rest:  # they are fast enough, and what shows is something else
        return Work(shows), hidden
    share = (rest + shows) / takes
    return Work(), Work(share * hidden.serial, share * hidden.parallel)


def _computing(
    seconds: float, samples: int, micro_batch: int, timed: Mapping[int, float]
) -> Measured:
    """Return the seconds of computing on shares, by those of micro-batches, and all as profiled.

    Where the micro-batch was not timed a share takes its part, as in the lemma.
    """
    sizes = {max(1, samples >> power) for power in range(samples.bit_length())} | {samples}
    if micro_batch not in timed:
        return Measured({n: seconds * n / samples for n in sizes})

    def share(n: int) -> float:
        return between(timed, n) if n <= micro_batch else step_seconds(timed, micro_batch, n)

    sizes |= {n for n in timed if n < samples}
    full = share(samples)
    return Measured({n: seconds * share(n) / full for n in sizes})
