"""Comparison of two lanes with the same rows one after the other, in the first step of a model.

Lanes that stop where samples meet share all Python state that no slot names (`LaneInspection`): an
attribute of a class, an object with `__slots__`, a cache, a ``threading.local``. What forward
stores there before BatchNorm and reads behind it would be another lane's. No walk finds every such
place, so a few rows are run both ways, without mixing their statistics, and must give the same.

    one after the other:  A ──────────── B ────────────
    in two lanes:         A ──┐ ┌─ A     B ──┐ ┌─ B       the token passes where samples meet
                              └─B┘           └─A┘

Both ways also show how forward moves a number of the model: B adds as much after A as without it,
or leaves the same number. Later steps add up those to which samples add, if these are counts, or
beside one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.core import pytree
from anybatch.core.barrier import Meeting, Site, here, looking, meeting_in
from anybatch.core.batch import MicroBatch, copied
from anybatch.core.norm import NonReducingNorms
from anybatch.core.oom import out_of_memory
from anybatch.core.python_state import Attributes, difference
from anybatch.core.rng import RNGState
from anybatch.errors import AnybatchError, LockstepError, NotExactError
from anybatch.execution.few_rows import (
    ENOUGH,
    ROW_ERRORS,
    computed,
    first_of,
    kernel_tolerance,
    quietly,
    two_sizes,
)
from anybatch.execution.guard import Guard
from anybatch.execution.step import Step
from anybatch.lockstep.lockstep import Surroundings
from anybatch.lockstep.scheduler import Lanes, LaneSlot, LaneSlots, LaneTurns

CLOSE = 1e-6
"""Of a number, the part by which two ways of adding it up may differ."""

SMALL = 1 << 16
"""Entries of a tensor, above which it is not compared: it is data."""

MEETING = "a place where samples meet"

SHARED = (
    "a micro-batch must find what it has stored itself where micro-batches wait for each other, "
    "and forward gives {found} in two lanes that take turns at BatchNorm: it stores something of "
    "its rows before that, and reads it behind, in a place that lanes share or that belongs to a "
    "thread (an attribute of a class, an object with __slots__, a cache, threading.local). Pass "
    'it as an argument, or store it in an attribute of a module; or use batchnorm="local", or '
    "give micro_batch >= the batch size"
)

ERRORS = (AnybatchError, *ROW_ERRORS)
"""Errors of a model that does not take so few rows."""

UNEQUAL = "no two lanes of a few rows could be compared with the same rows one after the other"


class Alternating(NonReducingNorms):
    """Passes the token to the other lane where samples meet, and mixes none of them.

    Args:
        step: whose model runs.
        lanes: those that wait; None for rows one after the other.
    """

    def __init__(self, step: Step, lanes: Meeting | None) -> None:
        super().__init__(step.counters, rows=step.global_batch.size)
        self._lanes = lanes

    def meets(self, site: Site) -> None:
        """Wait for the other lane."""
        del site
        if self._lanes is not None:
            self._lanes.exchange(MEETING, None, lambda parts: parts)


class _Turns(LaneTurns):
    """Each lane begins with the same random state and counters, and then has its own."""

    def __init__(self, slots: Iterable[LaneSlot], before: RNGState, counters: list[Tensor]) -> None:
        super().__init__(2, slots, everything=True)
        self._before, self._counters = before, counters
        self._first = [counter.clone() for counter in counters]
        self._counts: dict[int, list[Tensor]] = {}

    def begin(self, lane: int) -> None:
        """Make the lane's state the present one."""
        super().begin(lane)
        if lane not in self._counts:
            self._before.put_back()
        for counter, count in zip(self._counters, self._counts.get(lane, self._first), strict=True):
            counter.copy_(count)

    def pass_token(self, lane: int, coming: list[int]) -> None:
        """Store the lane's state."""
        super().pass_token(lane, coming)
        self._counts[lane] = [counter.clone() for counter in self._counters]


def refuse_shared_state(step: Step, slots: Sequence[LaneSlot]) -> None:
    """Refuse a model in which a lane reads the state of another lane.

    A number that each call moves is no proof that samples are separate: a later call may read it.

    Args:
        step: whose model has been inspected; its random state and its buffers are left as they are.
        slots: attributes and containers that each lane has of its own; their sums are set.
    """
    before = RNGState.now()
    full, part = two_sizes(step, most=ENOUGH)
    # They draw from a generator of their own, which the guard would note.
    turns = [_Turns(slots, before, step.counters) for _ in range(2)]
    wanted = found = None
    contents: list[list[Any]] = []
    with quietly(), torch.no_grad(), Guard(step) as guard:
        for count in dict.fromkeys((max(part.size - 1, 1), part.size)):  # of another size, if any
            pair = part, first_of(full, count)
            tensors = _tensors(step)
            wanted, contents = _in_order(step, pair, before, turns[0].slots.contents)
            if wanted is not None:
                _doubt_tensors(step, pair[1], tensors, before, turns[0].slots)
                found = _in_lanes(step, pair, turns)
                break
    step.buffers.restart()
    before.put_back()
    step.forget_casts()
    if guard.own_rng:  # whose numbers come in another order
        return
    if wanted is None or found is None:
        step.traits.doubt(UNEQUAL)
        return
    states = turns[0].slots.start, *contents, turns[0].slots.stored[1]
    _note_numbers(step, slots, (pair[0].size, pair[1].size), states)
    dtypes = computed(step)
    for one, other in zip(wanted, found, strict=True):
        outputs, others = list(pytree.tensors(one, "outputs")), list(pytree.tensors(other))
        if len(outputs) != len(others):
            raise NotExactError(SHARED.format(found="more or fewer tensors for the same rows"))
        for (path, a), (_, b) in zip(outputs, others, strict=True):
            if differ(a, b, dtypes):
                raise NotExactError(SHARED.format(found=f"other {path} for the same rows"))


def _call(step: Step, micro: MicroBatch) -> Any:
    """Return the outputs of some rows, which nothing writes to."""
    micro = copied(micro) if step.traits.copies else micro
    # Functions of all samples are to gather nothing, as in the inspection.
    with Alternating(step, here()), meeting_in(None), looking():
        outputs = step.call(micro, None)
    return pytree.map_tensors(lambda tensor: tensor.detach().clone(), outputs)


def _in_order(
    step: Step, pair: tuple[MicroBatch, MicroBatch], before: RNGState, contents: Callable[[], Any]
) -> tuple[Any, list[Any]]:
    """Return the outputs of one after the other, and the contents before and after each.

    The outputs are None where the model cannot take them.
    """
    found, states = [], [contents()]
    for micro in pair:
        before.put_back()
        step.buffers.restart()
        try:
            found.append(_call(step, micro))
            states.append(contents())
        except AnybatchError:  # it needs a graph, say: the step tells
            return None, states
        except ERRORS as error:
            if out_of_memory(error) or micro.size == pair[0].size:  # so many have been inspected
                raise
            step.buffers.restart()
            try:
                _call(step, micro)
            except ERRORS:  # it takes no so few
                return None, states
            raise  # it fails once
    return found, states


def _note_numbers(
    step: Step,
    slots: Sequence[LaneSlot],
    rows: tuple[int, int],
    states: Iterable[Sequence[Any]],
) -> None:
    """Set the sums of slots, and doubt a model of which each call moves a number."""
    for slot, *contents in zip(slots, *states, strict=True):
        moved = _moved(*contents) if isinstance(slot.held, dict) else []
        # A mean of samples adds other numbers, too: only a count beside it tells that it is a sum.
        counts = any(one.a * rows[1] == one.b * rows[0] != 0 for one in moved if one.adds)
        slot.sums = frozenset(
            one.key for one in moved if one.adds and one.a != one.b and (one.integer or counts)
        )
        for one in moved[:1]:
            step.traits.doubt(f"each call of forward moves {_path(step, slot.held, one.key)}")


class _Moved(NamedTuple):
    """A number of a slot that each call moves: its key, and how much two calls add, if they do."""

    key: Any
    a: float
    b: float
    adds: bool
    integer: bool


def _moved(start: Any, before: Any, first: Any, both: Any, second: Any) -> list[_Moved]:
    """Return the numbers of a slot that each call moves, not those that it sets.

    Args:
        start: content at which the second of two lanes began.
        before: that at which the first call of two in order began.
        first: after that call.
        both: after the call of the second rows in order.
        second: after the lane of the second rows.
    """
    found = []
    for key, value in second.items():
        every = [one.get(key) for one in (start, before, first, both)]
        if any(type(one) not in (int, float) for one in (value, *every)):
            continue
        a, b, once = every[2] - every[1], every[3] - every[2], value - every[0]
        adds = isclose(b, once, rel_tol=CLOSE)
        if (a or b or once) and (adds or every[3] != value):
            found.append(_Moved(key, a, b, adds, integer=type(value) is int))
    return found


def _tensors(step: Step) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the small tensors in plain attributes, and in dicts there, each with its values."""
    found = {}
    for path, module in step.model.named_modules():
        for name, value in vars(module).items():
            inside = value if type(value) is dict and name not in Attributes.OWN else {"": value}
            for key, tensor in inside.items():
                if isinstance(tensor, Tensor) and not tensor.is_nested and tensor.numel() <= SMALL:
                    place = ".".join(filter(None, (path, name, str(key))))
                    found[place] = tensor, tensor.detach().clone()
    return found


def _doubt_tensors(
    step: Step,
    rows: MicroBatch,
    start: dict[str, tuple[Tensor, Tensor]],
    before: RNGState,
    slots: LaneSlots,
) -> None:
    """Doubt a model of which a call leaves other tensors after another call than without it."""
    after = _tensors(step)
    _put_back(slots, start)
    before.put_back()
    step.buffers.restart()
    _call(step, rows)
    without, dtypes = _tensors(step), computed(step)
    _put_back(slots, start)
    for place, (_, values) in after.items():
        if place not in without or differ(values, without[place][1], dtypes):
            step.traits.doubt(f"each call of forward moves {place}")


def _put_back(slots: LaneSlots, start: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Restore attributes, and tensors that were written to in place."""
    slots.put_back()
    for tensor, values in start.values():
        if not torch.equal(_dense(tensor), _dense(values)):
            tensor.detach().copy_(values)


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor with all its values: a sparse one, as of a graph, has no comparison."""
    return tensor if tensor.layout == torch.strided else tensor.detach().to_dense()


def _path(step: Step, held: Any, key: Any) -> str:
    """Return the name of an attribute or an entry."""
    modules = (path for path, module in step.model.named_modules() if vars(module) is held)
    return ".".join(filter(None, (next(modules, ""), str(key))))


def _in_lanes(
    step: Step, pair: tuple[MicroBatch, MicroBatch], turns: Sequence[_Turns]
) -> list[Any] | None:
    """Return the outputs of two lanes; None where these do not meet equally often."""
    try:
        return _run_lanes(step, pair, turns[0])
    except Exception as error:
        if out_of_memory(error):
            raise
        try:
            _run_lanes(step, pair, turns[1])
        except Exception:
            text = f"{type(error).__name__} ({str(error)[:80]})"
            raise NotExactError(SHARED.format(found=text)) from error
        raise  # it fails once: a fault of another cause


def _run_lanes(step: Step, pair: tuple[MicroBatch, MicroBatch], turns: _Turns) -> list[Any] | None:
    step.buffers.restart()
    found: list[Any] = [None, None]

    def work(lane: int) -> None:
        found[lane] = _call(step, pair[lane])

    try:
        Lanes(2, turns, Surroundings.now().entered).run(work)
    except LockstepError:  # more rows need not go other ways
        return None
    finally:
        turns.slots.put_back()
    return found


def differ(a: Tensor, b: Tensor, dtypes: Iterable[torch.dtype]) -> bool:
    """Say whether two tensors differ by more than kernels round."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    a, b = _dense(a), _dense(b)
    if not (a.is_floating_point() or a.is_complex()):
        return not torch.equal(a, b)
    gap, size = difference(a, b)
    return gap > kernel_tolerance(a.dtype, dtypes) * size
