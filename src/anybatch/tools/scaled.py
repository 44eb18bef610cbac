"""Forecast of a training on more GPUs, from profiled steps and timed sizes of one.

    seconds of micro-batches ─┐
    profiled steps ───────────┼──> loop (`anybatch.tools.loop`) ──> T(G) ──> table, goal
    bytes of gradients, link ─┘

Computing on a share of the mini-batch is that of its micro-batches; the wait for storage is
constant, and preparation is divided, since each rank prepares its own share.

Source: Zou et al. (the guide), section 3.2, Lemma 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from anybatch.core.scale import ParameterServers, Scale, ScaleRow
from anybatch.core.units import show_seconds
from anybatch.planner.choice import between, step_seconds
from anybatch.tools.costs import GradientSum, Measured, NetworkLink, Work
from anybatch.tools.gpus import Needed, speedup
from anybatch.tools.loop import Loop
from anybatch.tools.profiled import Profile
from anybatch.tools.servers import Cluster
from anybatch.tools.stages import COMPUTE, LOAD, PREPARE, TRANSFER, UPDATE, LoopStage

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
    """Return the parameter servers of workers that each compute a full mini-batch in a round."""
    cluster = Cluster(workers, compute, nbytes, server=link.bandwidth, worker=link.bandwidth)
    found = cluster.servers_for()
    count = found.count if servers == "auto" else servers
    traffic = cluster.own_seconds if count is None else cluster.io_seconds(count)
    return ParameterServers(workers, count, found.count, traffic / compute, found.reason)


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
