"""Sections of a plan as data: memory, convolutions, pace, scale, and the evidence for exactness."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

from anybatch.core.units import show_bytes, show_seconds

Capacity = int | tuple[int, ...] | None
"""Bytes that waiting micro-batches may hold: at any time; in each segment of the one that runs,
from the first on; or None where all of them may be resident."""


class LockstepLimits(NamedTuple):
    """Byte limits of micro-batches that wait in lockstep, the running one included.

    Attributes:
        limit: before a kernel runs, with all that it needs.
        segment_extra: in addition to the limit, in each segment. Default none.
        segment_kernel: the largest output of a kernel in each segment, for which the limit leaves
            space. Default: not recorded.
    """

    limit: int
    segment_extra: tuple[int, ...] = ()
    segment_kernel: tuple[int, ...] = ()


RUNNERS_UP = 2
"""Candidates that lost by least; a plan says so."""


@dataclass(frozen=True)
class Candidate:
    """A micro-batch that was considered.

    Attributes:
        micro_batch: samples.
        peak_bytes: predicted peak of a step with it.
        seconds: of a step, the fewest; None where none was run.
        offloaded: its saved tensors are offloaded, as far as they do not fit. Default False.
    """

    micro_batch: int
    peak_bytes: int
    seconds: float | None = None
    offloaded: bool = False


@dataclass(frozen=True)
class Memory:
    """Memory section of a plan, in bytes.

    Attributes:
        budget: the most a step may hold.
        source: where the budget comes from.
        predicted: bytes of a step at its peak.
        owners: ``(name, bytes)`` at the peak, the largest first.
        floor: least peak of a step, at one sample; None where `Engine.foresee` would tell it.
        undivided: peak of the undivided batch.
        how: how it was predicted.
        candidates: the micro-batches that were considered, by size.
        waiting_capacity: bytes for waiting micro-batches on the device, in lockstep.
        chunked: bytes of one chunk of a wide linear map; 0 (default) without chunks.
        inspection: bytes of a full inspection of the model; 0 (default) where it was not forecast.
        tile: tokens of a tile, in modules of single tokens; 0 (default) without tiles.
    """

    budget: int
    source: str
    predicted: int
    owners: tuple[tuple[str, int], ...]
    floor: int | None
    undivided: int
    how: str
    candidates: tuple[Candidate, ...] = ()
    waiting_capacity: Capacity = 0
    chunked: int = 0
    inspection: int = 0
    tile: int = 0


def check_count(name: str, value: Any) -> None:
    """Refuse a value that is not an integer of at least 1.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, and it is {value!r}")


def memory_of(found: Mapping[str, Any], *, offloaded: bool) -> Memory:
    """Return the memory section from JSON; the flag is for candidates that do not have one."""
    check_count("budget", found["budget"])
    check_count("predicted", found["predicted"])
    capacity = found.get("waiting_capacity", 0)
    several = isinstance(capacity, list | tuple)
    return Memory(
        **{
            **found,
            "waiting_capacity": tuple(map(int, capacity)) if several else capacity,
            "owners": tuple((str(name), int(count)) for name, count in found["owners"]),
            "candidates": tuple(
                Candidate(**{"offloaded": offloaded, **one}) for one in found["candidates"]
            ),
        }
    )


def explain(memory: Memory, chosen: int, *, offloaded: bool = False) -> list[str]:
    """Return the plan's lines on memory: the peak, its owners, and the runners-up.

    Args:
        memory: memory of the plan.
        chosen: samples in a micro-batch, as was chosen.
        offloaded: its saved tensors are offloaded. Default False.
    """
    share = f"{show_bytes(memory.predicted)} of {show_bytes(memory.budget)} ({memory.source})"
    lines = [f"  memory       {share}, predicted by {memory.how}"]
    lines += [f"    {name:<18} {show_bytes(count):>10}" for name, count in memory.owners]
    if not (floor := show_floor(memory)):
        return lines
    head = ["  micro-batch      memory   seconds a step"] if memory.candidates else []
    lines += [f"  floor        {floor}", *head]
    both = len({one.offloaded for one in memory.candidates}) > 1
    every = verdicts(memory, chosen, offloaded=offloaded)
    return lines + [f"  {_row(one, why, both=both)}" for one, why in every]


def show_floor(memory: Memory) -> str:
    """Return the fewest bytes of a step, and those of an undivided one; "" where unknown."""
    least = memory.floor and f"{show_bytes(memory.floor)} at one sample a micro-batch"
    return f"{least}; {show_bytes(memory.undivided)} undivided" if least else ""


def verdicts(
    memory: Memory, chosen: int, *, offloaded: bool = False
) -> list[tuple[Candidate, str]]:
    """Return every candidate and, in words, why it was chosen or lost.

    Args:
        memory: the memory of a plan.
        chosen: samples in a micro-batch, as was chosen.
        offloaded: its saved tensors are offloaded. Default False.
    """
    every = memory.candidates
    same = [one for one in every if (one.micro_batch, one.offloaded) == (chosen, offloaded)]
    best = same[0] if same else None
    next_best = runners_up(every, best)
    fastest = min((one.seconds for one in every if one.seconds is not None), default=None)
    return [
        (one, _chosen(one, fastest))
        if one is best
        else (one, _why(one, best, memory.budget, runner_up=one in next_best))
        for one in every
    ]


def runners_up(every: Sequence[Candidate], best: Candidate | None) -> list[Candidate]:
    """Return the candidates that lost by least, of those that were timed, the fastest first.

    Args:
        every: that were considered.
        best: the one that was chosen; None, or one that was not timed, has no runners-up.
    """
    if best is None or best.seconds is None:
        return []
    timed = [(one.seconds, one) for one in every if one.seconds is not None and one != best]
    return [one for _, one in sorted(timed, key=lambda pair: pair[0])[:RUNNERS_UP]]


SCATTER = 1.05
"""Times the fastest step, within which another size is as fast: steps scatter as much."""


def _chosen(one: Candidate, fastest: float | None) -> str:
    if one.seconds is None or fastest is None:
        return "chosen"
    if one.seconds == fastest:
        return "chosen: the fastest timed"
    return "chosen: as fast as any" if one.seconds <= SCATTER * fastest else "tried in this step"


def _why(one: Candidate, best: Candidate | None, budget: int, *, runner_up: bool) -> str:
    if one.peak_bytes > budget:
        return f"does not fit: {show_bytes(one.peak_bytes - budget)} too much"
    if one.seconds is None:
        return "fits, not timed"
    if best is None or not best.seconds:
        return ""
    slower = one.seconds / best.seconds - 1
    why = f"{abs(100 * slower):.0f} % {'slower' if slower > 0 else 'faster'}"
    why = why if abs(slower) >= 0.005 else "as fast"
    return f"runner-up: {why}" if runner_up else why


def _row(one: Candidate, why: str, *, both: bool) -> str:
    """Return the line of a candidate; `both`: some candidates offload, and some do not."""
    seconds = "-" if one.seconds is None else f"{one.seconds:.3g}"
    why = f"saved tensors offloaded; {why}" if both and one.offloaded else why
    return f"{one.micro_batch:>11} {show_bytes(one.peak_bytes):>11} {seconds:>16}   {why}"


# Convolution section of a plan: the division of each kernel, and its workspace.
#
# A resumed run must compute the same bits as before; new measurements might yield other divisions.
# So the divisions are a part of the plan.


@dataclass(frozen=True)
class KernelPart:
    """A convolution kernel on some samples, as it was measured: a micro-configuration.

    Attributes:
        size: samples.
        algorithm: its name.
        seconds: that it takes.
        workspace: bytes that it allocates beside its operands and its result.
        setup: seconds that its algorithm takes once for all its parts in a configuration; the same
            for every part of an algorithm. Default 0.
    """

    size: int
    algorithm: str
    seconds: float
    workspace: int
    setup: float = 0.0


@dataclass(frozen=True)
class Configuration:
    """Parts that run one after another; together they are a kernel on all samples.

    Attributes:
        parts: in the order in which they run.
    """

    parts: tuple[KernelPart, ...]

    @property
    def size(self) -> int:
        """N, the samples of all parts."""
        return sum(part.size for part in self.parts)

    @property
    def seconds(self) -> float:
        """Return the seconds of all parts, and of one setup for each algorithm."""
        return sum(part.seconds for part in self.parts) + sum(setups(self.parts).values())

    @property
    def workspace(self) -> int:
        """Bytes of the largest workspace among the parts: they use the same one."""
        return max((part.workspace for part in self.parts), default=0)

    @property
    def divided(self) -> bool:
        """Whether it is not just torch's own kernel on all samples."""
        return len(self.parts) > 1 or self.parts[0].algorithm != "native"

    def __str__(self) -> str:
        """Return for example ``fft@4 x 8, native@3``."""
        runs = groupby(self.parts, key=lambda part: f"{part.algorithm}@{part.size}")
        counted = ((name, sum(1 for _ in parts)) for name, parts in runs)
        return ", ".join(name if count == 1 else f"{name} x {count}" for name, count in counted)


def setups(parts: Iterable[KernelPart]) -> dict[str, float]:
    """Return algorithm -> seconds that it takes once, of those that take some."""
    return {part.algorithm: part.setup for part in parts if part.setup > 0}


@dataclass(frozen=True)
class Division:
    """How a kernel is computed on so many samples.

    Attributes:
        kernel: its description, ``(name, value)``.
        samples: N, of a micro-batch.
        parts: ``(samples, algorithm, seconds, bytes of workspace, seconds once)``, one after
            another.
        seconds: that torch's own kernel takes.
    """

    kernel: tuple[tuple[str, Any], ...]
    samples: int
    parts: tuple[tuple[int, str, float, int, float], ...]
    seconds: float

    @property
    def configuration(self) -> Configuration:
        """The parts as an object, with their seconds and workspace together."""
        return Configuration(tuple(KernelPart(*part) for part in self.parts))


@dataclass(frozen=True)
class Divisions:
    """How the convolutions of a step are computed.

    Attributes:
        workspace: bytes that a kernel may allocate in addition to its operands and its result.
        policy: which micro-batches were measured.
        used: the most of it that any of these kernels does allocate.
        kernels: all that were chosen.
        requested: requested bytes, if they leave too little for a step; else 0.
    """

    workspace: int
    policy: str
    used: int
    kernels: tuple[Division, ...]
    requested: int = 0

    @property
    def other(self) -> int:
        """How many kernels are not torch's own on all samples at once."""
        return sum(one.configuration.divided for one in self.kernels)

    def __str__(self) -> str:
        """Return the plan's line on convolutions."""
        space = f"{show_bytes(self.used)} of {show_bytes(self.workspace)} of workspace"
        less = f" ({show_bytes(self.requested)} would leave too little for a step)"
        return (
            f"{self.other} of {len(self.kernels)} kernels not torch's own; {space}"
            f"{less if self.requested else ''}"
        )

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Divisions:
        """Return the divisions from JSON.

        Args:
            found: the object in a plan's JSON, where tuples are lists.
        """
        kernels = tuple(
            Division(
                tuple((str(name), _tuples(value)) for name, value in one["kernel"]),
                int(one["samples"]),
                tuple(
                    (int(n), str(a), float(t), int(w), float(s)) for n, a, t, w, s in one["parts"]
                ),
                float(one["seconds"]),
            )
            for one in found["kernels"]
        )
        return cls(**{**found, "kernels": kernels})


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# How fast a training is with a plan: seconds of a step, and of an epoch, with an interval.
#
# Seconds of micro-batches choose a plan; they omit the loader, the optimizer and the time between.
# So a few steps of the real loop are measured, and multiplied by the steps of an epoch.

FEW = 6
"""Steps below which no interval is given."""


@dataclass(frozen=True)
class Pace:
    """Measured seconds of steps of the real loop.

    Attributes:
        seconds: of a step: waiting for its mini-batch, computing, and the update; mean.
        interval: of that mean, 95 %, by resampling the steps; too narrow where they are few.
        steps: that were measured.
        overhead: R_O, visible time outside of computing, to computing.
        epoch: steps of an epoch; None where the loader does not say.
    """

    seconds: float
    interval: tuple[float, float]
    steps: int
    overhead: float
    epoch: int | None = None

    def of(self, steps: int) -> tuple[float, float, float]:
        """Return the seconds of some `steps`, and the bounds of their interval."""
        low, high = self.interval
        return steps * self.seconds, steps * low, steps * high

    def in_words(self, steps: int) -> str:
        """Return the seconds of some `steps` in words, with their interval if there is one."""
        found, low, high = map(show_seconds, self.of(steps))
        return f"{found} ({low} to {high})" if self.steps >= FEW else found

    def __str__(self) -> str:
        plural = "step" if self.steps == 1 else "steps"
        lines = [f"{self.in_words(1)} a step, of {self.steps} {plural} of the real loop"]
        if self.epoch is not None:
            lines.append(f"{self.in_words(self.epoch)} an epoch of {self.epoch} steps")
        return f"\n{' ' * 15}".join(lines)


# Forecast for more GPUs in a plan: seconds of a step on each number, and the number worth it.
#
# The same mini-batch is divided among them, so the training stays the same. On request there is a
# training of another sort beside it: workers that do not wait for each other, and the servers that
# hold their parameters.
#
# Source: Zou et al. (the guide), sections 3.2 and 3.3, Lemmas 3.1 and 3.2.


@dataclass(frozen=True)
class ScaleRow:
    """A number of GPUs.

    Attributes:
        gpus: G.
        seconds: of a step, predicted.
        speedup: over one.
        efficiency: that over G.
        lemma: the speedup by Lemma 3.1, from R_O only.
    """

    gpus: int
    seconds: float
    speedup: float
    efficiency: float
    lemma: float


@dataclass(frozen=True)
class ParameterServers:
    """Parameter servers of workers that do not wait for each other.

    Attributes:
        workers: N_w, GPUs that compute a mini-batch each in a round.
        servers: N_ps, as requested, or the fewest that hide the traffic; None where no number does.
        fewest: servers that hide the traffic; None where no number does.
        traffic: seconds of a round's traffic over those of its computing, with `servers`.
        reason: the obstacle, where no number of servers hides the traffic; else "".

    Source: guide, Lemma 3.2.
    """

    workers: int
    servers: int | None
    fewest: int | None
    traffic: float
    reason: str

    @property
    def utilisation(self) -> float:
        """Part of a round in which a worker computes, at best: as if no transfer queued."""
        return 1 / max(1.0, self.traffic)

    def __str__(self) -> str:
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        if self.servers is None:
            return f"no number of them hides the traffic of {workers}: {self.reason}"
        if self.servers == self.fewest:
            return f"{_hide(self.servers)} the traffic of {workers}"
        more = "no number hides" if self.fewest is None else _hide(self.fewest)
        return (
            f"{self.servers} for {workers}: traffic takes {self.traffic:,.2f} times as long as "
            f"computing, which is {self.utilisation:.0%} of a round; {more} it"
        )


def _hide(servers: int) -> str:
    return "1 server hides" if servers == 1 else f"{servers} servers hide"


@dataclass(frozen=True)
class Scale:
    """Forecast of a training on more GPUs.

    Attributes:
        rows: by GPUs, one first.
        gpus: as many as the goal needs, or as requested; None without a goal, or if it is
            unreachable.
        goal: in words; empty where there is none.
        worth: GPUs after which no more of them gain 5 % of speed each.
        fastest: GPUs with which a step is fastest.
        assumed: quantities that were not measured, a sentence each.
        servers: of as many workers as there are GPUs; None (default): not requested.
    """

    rows: tuple[ScaleRow, ...]
    gpus: int | None
    goal: str
    worth: int
    fastest: int
    assumed: tuple[str, ...]
    servers: ParameterServers | None = None

    def explain(self) -> list[str]:
        """Return the plan's lines on more GPUs."""
        lines = ["  GPUs      seconds a step   speedup   efficiency   Lemma 3.1"]
        lines += [
            f"  {one.gpus:>4} {show_seconds(one.seconds):>19} {one.speedup:>9.2f} "
            f"{one.efficiency:>12.0%} {one.lemma:>11.2f}{'   <' if one.gpus == self.gpus else ''}"
            for one in self.rows
        ]
        if self.goal:
            lines.append(f"  goal         {self.goal}")
        lines.append(f"  worth it     up to {self.worth} GPUs; fastest with {self.fastest}")
        if self.servers is not None:
            lines.append(f"  servers      {self.servers} (Lemma 3.2)")
        return lines + [f"  assumed      {one}" for one in self.assumed]

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Scale:
        """Return the forecast from JSON.

        Args:
            found: the object in a plan's JSON, where tuples are lists.
        """
        rows = tuple(ScaleRow(**row) for row in found["rows"])
        more: dict[str, Any] = {"rows": rows, "assumed": tuple(found["assumed"])}
        if found.get("servers") is not None:
            more["servers"] = ParameterServers(**found["servers"])
        return cls(**{**found, **more})


# The way between a device and the store beyond it: its speed, and when something is under way.
#
# No torch here: offload schedules and timelines are made of these.


@dataclass(frozen=True)
class Link:
    """The way between device and host.

    Attributes:
        out: bytes a second to the host.
        back: bytes a second from it.
        duplex: both at the same time.
    """

    out: float
    back: float
    duplex: bool = True


@dataclass(frozen=True)
class Interval:
    """When something was under way: seconds from the beginning of the step."""

    begin: float
    end: float


# Evidence for the word "exact" in a plan.
#
# shown        the gradient is that of the undivided batch, and this is how that was shown not shown
# nothing speaks against it, and it could not be shown inexact      another gradient was requested
# by name

State = Literal["shown", "not shown", "inexact"]
STATES = ("shown", "not shown", "inexact")


@dataclass(frozen=True)
class Evidence:
    """Whether a plan gives the gradient of the undivided batch, and the evidence for it.

    It is true where that was shown, and false otherwise.

    Attributes:
        state: "shown", "not shown" or "inexact".
        by: the instrument that has shown it, or the reason why it could not be shown.
        step: the step of its signature that inspected it last; 0 is before any.
    """

    state: State
    by: str
    step: int = 0

    def __bool__(self) -> bool:
        return self.state == "shown"

    def __str__(self) -> str:
        at = f", step {self.step}" if self.step else ""
        return f"{self.state}: {self.by}{at}"

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Evidence:
        """Return the evidence that was saved with a plan.

        Args:
            found: the object in the plan's JSON.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(found, Mapping) or found.get("state") not in STATES:
            raise ValueError(f"exact must have a state of {STATES}, and it is {found!r}")
        return cls(**found)


UNDIVIDED = Evidence("shown", "the batch is not divided")
FORESEEN = Evidence("not shown", "no step has been run")
