"""Memory section of a plan: the budget, the forecast, and the candidates that lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from anybatch.core.units import show_bytes

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
        seconds: of a full step, run or from its timed micro-batches; None where it was not timed.
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
        floor: least peak of a step, with micro-batches of one sample.
        undivided: peak of the undivided batch.
        how: how it was predicted.
        candidates: the micro-batches that were considered, by size.
        waiting_capacity: bytes for waiting micro-batches on the device, in lockstep.
    """

    budget: int
    source: str
    predicted: int
    owners: tuple[tuple[str, int], ...]
    floor: int
    undivided: int
    how: str
    candidates: tuple[Candidate, ...] = ()
    waiting_capacity: Capacity = 0


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
    lines += [
        f"  floor        {show_bytes(memory.floor)} at one sample a micro-batch; "
        f"{show_bytes(memory.undivided)} undivided"
    ]
    if memory.candidates:
        lines += ["  micro-batch      memory   seconds a step"]
    both = len({one.offloaded for one in memory.candidates}) > 1
    every = verdicts(memory, chosen, offloaded=offloaded)
    return lines + [f"  {_row(one, why, both=both)}" for one, why in every]


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
    best = next(
        (one for one in every if (one.micro_batch, one.offloaded) == (chosen, offloaded)), None
    )
    next_best = runners_up(every, best)
    return [(one, _why(one, best, memory.budget, runner_up=one in next_best)) for one in every]


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


def _why(one: Candidate, best: Candidate | None, budget: int, *, runner_up: bool) -> str:
    if one is best:
        return "chosen" if one.seconds is None else "chosen: the fastest timed"
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
