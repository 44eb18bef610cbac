"""Recorder of a step: every live byte, cut where autograd saves and asks; and a cache of it.

A dispatch mode counts live bytes (`anybatch.memory.meter`). Tensors that only autograd would hold
are offloaded while a step is recorded, so the counted bytes are those that no hook can move. Two
sums are counted: storages that may move while forward uses them, and the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

from anybatch.core import accelerator
from anybatch.core.modules import name_of
from anybatch.core.optimizers import rounded
from anybatch.core.plan_sections import Link
from anybatch.errors import BudgetError
from anybatch.memory.meter import FOREIGN, Meter, tensors_in, written_by
from anybatch.offloading.course import Course, Cut, Recording, Remake, set_course
from anybatch.offloading.mover import Handle, Mover, Saved

RRELU = (torch.ops.aten.rrelu_with_noise.default, torch.ops.aten.rrelu_with_noise_.default)
RRELU_TAKES = ("self", "noise", "lower", "upper", "training")


class ExcludedWork:
    """Live bytes of work that is excluded from the recording.

    Attributes:
        before: bytes that lived when it began.
        most: the most bytes that lived meanwhile.
    """

    def __init__(self, before: int) -> None:
        self.before = self.most = before


class StepRecorder(Meter):
    """Records a step while everything is offloaded as soon as possible.

    Args:
        device: of the tensors that count.
        tries: bytes within which it is tried to make storages again; by default it is not.
        there: bytes that were allocated before and count among these, if known; None if `tries` is
            only for the step's own.

    Attributes:
        tried: the most bytes that the step made while something was tried.
        asides: the kernels, as they were counted, in which it was tried.
        outside: bytes that were there before, and were used.
        leaves: weak references on the leaves among them that require a gradient.
        gradients: bytes of the gradients that these had.
    """

    def __init__(self, device: torch.device, tries: int = 0, there: int | None = 0) -> None:
        self.outside = self.gradients = self.tried = 0
        self.tries = tries
        self.asides: list[range] = []
        self._there = there
        self._remakes: dict[int, Remake] = {}
        self._behind = False  # somebody writes to results behind autograd's back
        self._standing: list[int] = []
        self.leaves: dict[int, weakref.ref[Tensor]] = {}
        super().__init__(device)
        self._moving = self._most = 0
        self._alive: dict[int, Any] = {}
        self._handles: dict[int, list[weakref.ref[Handle]]] = {}
        self._cuts: list[Cut] = []
        self._sizes: list[int] = []
        self._used: list[set[int]] = [set()]
        self._rest = [0]
        self._seconds: list[float] = []
        self._ends: dict[int, int] = {}  # storage -> the interval in which its last handle died
        self._requested: set[int] = set()
        self._loose: set[int] = set()
        self._place = device
        self._since = perf_counter()

    def born(self, storage: Any) -> bool:
        """Say whether a storage was made in this step."""
        span = self._open.get(storage._cdata)
        return span is not None and span.owner != FOREIGN

    def cut(self, cut: Cut) -> None:
        """Begin a new interval."""
        self._seconds.append(self._now() - self._since)
        self._cuts.append(cut)
        if not cut.saves:
            self._requested.add(cut.number)
        self._used.append(set(self._alive))
        self._rest.append(self.live - self._moving)
        self._standing.append(self._rest[-1])

    def permits(self, size: int) -> bool:
        """Return whether the budget permits so many more bytes for a trial."""
        existing = 0 if self._there is None else max(self.outside, self._there)
        return self.live + existing + size <= self.tries

    @contextmanager
    def excluded(self) -> Iterator[ExcludedWork]:
        """Count the work in the body separately: it is no part of the step."""
        found = ExcludedWork(self.live)
        peak, rest, begin = self.peak, self._rest[-1], self.events
        self.peak = self.live
        try:
            yield found
        finally:
            found.most = self.peak
            self.tried = max(self.tried, self.peak)
            self.asides.append(range(begin, self.events))
            self.peak, self._rest[-1] = peak, rest

    def cheap(self, number: int, remake: Remake) -> None:
        """A storage was made again bit for bit."""
        self._remakes[number] = remake

    def resume(self) -> None:
        """Let the clock go on after a cut."""
        self._since = self._now()

    def _now(self) -> float:
        """Return the time when the device has finished: it computes asynchronously."""
        accelerator.of(self._place).synchronise(self._place)
        return perf_counter()

    def saved(self, saved: Saved) -> None:
        """Take in a storage that autograd saves for the first time."""
        self._sizes.append(self._rounded(saved.size))
        self.lives(saved)
        number = saved.number
        weakref.finalize(saved, self._dropped, number).atexit = False
        self._rest[-1] = self.live - self._moving

    def handles(self, handle: Handle, storage: Any) -> None:
        """Record the handle that autograd received for a tensor on a live storage."""
        self._handles.setdefault(storage._cdata, []).append(weakref.ref(handle))

    def lives(self, saved: Saved) -> None:
        """A storage that may move is in memory, or will be at once."""
        number = saved.number
        if number not in self._alive:
            self._moving += self._rounded(saved.size)
            self._used[-1].add(number)
            self._alive[number] = None

    def follow(self, saved: Saved) -> None:
        """Record when a storage is no longer in memory."""
        storage = saved.here()
        self._alive[saved.number] = weakref.ref(storage, partial(self._gone, saved.number))

    def replaced(self, saved: Saved) -> None:
        """Record a write to a storage, which invalidates its earlier saves."""
        self._loose.add(saved.number)
        self._gone(saved.number)

    def recording(self, there: int = 0) -> Recording:
        """Return the recording; `there`: bytes that were allocated before, if measured."""
        outside = max(self.outside, there)
        self._seconds.append(self._now() - self._since)
        last = {number: i for i, used in enumerate(self._used) for number in used}
        for number in range(len(self._sizes)):
            end = self._ends.get(number)
            if number not in self._requested or end is None or end > last[number]:
                self._loose.add(number)
        remakes = {
            number: remake
            for number, remake in self._remakes.items()
            if not (self._behind or self._loose.intersection((number, *remake.sources)))
        }
        return Recording(
            cuts=tuple(self._cuts),
            sizes=tuple(self._sizes),
            used=tuple(map(frozenset, self._used)),
            rest=tuple(max(0, rest) for rest in self._rest),
            seconds=tuple(self._seconds),
            loose=frozenset(self._loose),
            outside=outside,
            peak=self.peak + outside,
            standing=tuple(max(0, rest) for rest in self._standing),
            remakes=remakes,
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one kernel, and count."""
        if func._schema.is_mutable and not torch.is_grad_enabled():
            every = tensors_in((args, kwargs))
            self._behind = self._behind or any(t.requires_grad and not t.is_leaf for t in every)
        for tensor in _written(func, args, kwargs or {}):
            self._writes(str(func), tensor)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._rest[-1] = max(self._rest[-1], self.live - self._moving)
        return result

    def _writes(self, kernel: str, tensor: Tensor) -> None:
        """Record a write to a saved tensor; if autograd counts it, that is another error."""
        for storage in self._storages(tensor):
            for ref in self._handles.get(storage._cdata, ()):
                handle = ref()
                there = None if handle is None else handle.saved.here()
                if handle is None or there is None or there._cdata != storage._cdata:
                    continue  # it has died, and another has its address
                if handle.writer is None and handle.overlaps(tensor):
                    handle.writer = kernel

    def _see(self, tensor: Tensor, owner: str, least: int = 0) -> bool:
        if owner == FOREIGN and tensor.requires_grad and tensor.is_leaf:
            key = id(tensor)
            if key not in self.leaves and self._counts(tensor):
                self.leaves[key] = weakref.ref(tensor)
                self.gradients += gradient_bytes(tensor)
        return super()._see(tensor, owner, least)

    def _begin(self, storage: Any, owner: str, size: int, reported: int) -> None:
        super()._begin(storage, owner, size, reported)
        if owner == FOREIGN:
            self.outside += self._rounded(reported)

    def _gone(self, number: int, _watch: Any = None) -> None:
        if number in self._alive:
            del self._alive[number]
            self._moving -= self._sizes[number]

    def _dropped(self, number: int) -> None:
        self._ends[number] = len(self._cuts)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a kernel writes to; RReLU draws noise only in training."""
    if func not in RRELU or dict(zip(RRELU_TAKES, args, strict=False), **kwargs).get("training"):
        yield from written_by(func, args, kwargs)


def gradient_bytes(leaf: Tensor) -> int:
    """Return the bytes of a leaf's gradient."""
    grad = leaf.grad
    if grad is None or grad.layout != torch.strided:
        return 0
    return rounded(grad.untyped_storage().nbytes(), grad.device)


# Recorded steps, found by their first cuts, and the course of each within a memory.
#
# A step that differs from the recording is recorded again: more often in a row the more often that
# happens, for shapes may change from step to step. A step is planned once for every limit and
# number of other bytes.
#
#     recorded ──> found by its first cut ──> course within a memory ──> followed ── missed ┐
#        ^                                                                                  │
#        └──────────────────────────────────────────────────────────────────────────────────┘

FAST = 1e12
"""Bytes a second of a link that nothing has gone over."""

MOST = 8
"""Steps of a signature that are recorded in a row, at most, while shapes change."""

CAPACITY = 16
"""Recorded steps of a signature that are cached at a time."""


class ScheduleCache:
    """Recorded steps by first cut, and the number of steps to record before the next plan.

    Attributes:
        to_record: steps that are recorded before one is planned again.
        recorded: the steps, by their first cuts.
    """

    def __init__(self) -> None:
        self.to_record = 1
        self.recorded: dict[Cut, Recorded] = {}
        self._misses = 0

    def learn(self, one: Recorded) -> None:
        """Take in a step that was recorded; one that has saved nothing needs no course."""
        self.to_record -= 1
        cuts = one.recording.cuts
        if cuts:
            if len(self.recorded) == CAPACITY:
                del self.recorded[next(iter(self.recorded))]
            self.recorded[cuts[0]] = one

    def missed(self) -> None:
        """Have the next ones recorded: a step has done nothing that was recorded."""
        self._misses += 1
        self.to_record = min(self._misses, MOST)


class Recorded:
    """A recorded step, and the courses that were set for it.

    Args:
        recording: the step.
        link: how fast storages have gone.
        watch: recorded it; has the leaves whose gradients may exist by now. None (default) if other
            bytes are counted elsewhere.
        there: bytes that were allocated before, if counted. Default 0.

    Attributes:
        recording: the step.
    """

    def __init__(
        self, recording: Recording, link: Link, watch: StepRecorder | None = None, there: int = 0
    ) -> None:
        self.recording, self._link = recording, link
        self._leaves = {} if watch is None else watch.leaves
        self._then = there or (0 if watch is None else watch.gradients)
        self._courses: dict[tuple[int, int], Course | None] = {}

    def more(self, there: int) -> int:
        """Return the bytes there now that were not: on the CPU gradients, on CUDA anything."""
        leaves = (leaf for ref in self._leaves.values() if (leaf := ref()) is not None)
        return max(0, (there or sum(map(gradient_bytes, leaves))) - self._then)

    def course(self, memory: int, more: int = 0) -> Course | None:
        """Return the course of the step within a memory; None where no course fits."""
        key = memory, more
        if key not in self._courses:
            try:
                self._courses[key] = set_course(self.recording, memory, self._link, more)
            except BudgetError:
                self._courses[key] = None
        return self._courses[key]


def link_of(mover: Mover) -> Link:
    """Return how fast storages have gone so far."""
    rates = [size / spent if spent else FAST for size, spent in mover.rates]
    return Link(out=rates[0], back=rates[1])


# Saved tensors that are never offloaded: above all weights, which are resident anyway.
#
# ``save_on_cpu`` offloads everything that autograd saves, the weights of every layer too, which
# frees nothing. A weight is saved as itself, as a view (``weight.t()``), or as the copy in another
# dtype that autocast makes and caches: the graph behind it shows this, because it ends at once in a
# leaf.

MOVES = (Tensor, Parameter, FakeTensor)
"""Other classes may hold their data elsewhere; fakes hold none, in a step that is rehearsed."""

ALIKE = frozenset(
    f"{name}Backward0"
    for name in "Alias Detach Expand Permute ReshapeAlias Slice Squeeze Split T Select "
    "ToCopy Transpose Unsqueeze UnsafeView View".split()
)
"""Nodes whose result is a view of their input, or a copy in another dtype."""

LEAF = "torch::autograd::AccumulateGrad"


def may_move(tensor: Tensor, device: torch.device, least: int) -> bool:
    """Return whether a saved tensor can be offloaded from `device` and return.

    Args:
        tensor: as autograd saves it.
        device: tensors elsewhere are not offloaded.
        least: bytes of a storage below which it is not offloaded.
    """
    return (
        type(tensor) in MOVES
        and tensor.layout == torch.strided
        and tensor.untyped_storage().nbytes() >= least  # most are small, and asked no more
        and tensor.device.type == device.type
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.is_inference()
    )


def is_weight(tensor: Tensor) -> bool:
    """Say whether it is a leaf that wants a gradient, a view of one, or one in another dtype."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, Parameter) or (base.is_leaf and base.requires_grad):
        return True
    node = tensor.grad_fn
    while node is not None and name_of(node) in ALIKE:
        node = node.next_functions[0][0]
    return node is not None and name_of(node) == LEAF
