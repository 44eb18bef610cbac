"""Pager of waiting lanes' storages: evicted while a lane waits, back when a kernel needs them.

``saved_tensors_hooks`` move only the tensors that autograd saves: those that Python holds at a
barrier (inputs, the branch of a residual, the normalised tensor) would stay resident, a fifth of
the full batch's peak for micro-batches of any size. Here a tensor retains its storage, and the
storage frees its memory: its bytes are copied out, and it is resized to nothing. Every kernel is
intercepted before it runs, in forward and in backward, and its storages are resident when it does.

    lane 0 runs ── barrier ── its storages leave, the furthest next use first ── ... ── it is next:
    what it will use comes ahead of it; what was not written to need not be copied out again

The next lane is determined, and the first lane in its segment has shown its storages.

Where not even one lane fits, the running lane is offloaded, too: before each of its kernels so much
is evicted that the tensors of the kernel fit, first from waiting lanes, and then its own least
recently used storages. Storages that a chain of layers saves first are needed last in backward, so
those are also needed last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from anybatch.core.modules import DispatchMode, parts_of_sparse
from anybatch.core.plan_sections import Capacity, LockstepLimits
from anybatch.memory.lockstep_budget import in_segment
from anybatch.memory.meter import Meter, tensors_in
from anybatch.memory.pager import EVICTING, OFFLOADED, RESIDENT, Held, Pager
from anybatch.memory.stores import Store

SMALL = 256
"""Bytes below which a storage is not evicted without a budget: its copies would cost more."""


# Record of the storages that lanes use in their segments, made by the first of them.
#
# Lanes run the same layers in the same order. So the 17th storage of a lane corresponds to the 17th
# of another. The next lane will need the earlier storages that the first lane has needed in a
# segment, between two barriers: they can be prefetched before it runs, and others evicted first.
#
#     segment 3 of lane 7:   uses its 4th, 17th, 18th
#     segment 3 of lane 6:   its own 4th, 17th, 18th are on their way while lane 7 computes


class SegmentRecord:
    """Record of a segment, made by the first lane in it.

    Attributes:
        lane: it.
        numbers: of its storages from earlier segments, in the order of their use; may grow.
        bytes: of these.
        top: the most bytes, used or made, that any lane has held in the segment.
    """

    def __init__(self, lane: int = -1) -> None:
        self.lane = lane
        self.numbers: list[int] = []
        self.bytes = self.top = 0


NOT_SHOWN = SegmentRecord()
"""Of a segment that no other lane has run."""


class LanePager(Pager):
    """Pager that limits resident bytes of waiting lanes to a capacity and a permitted excess.

    Args:
        capacity: bytes, the same in every segment or of each.
        store: where the rest goes.
        device: of the storages; others are never evicted.
        meters: count the resident bytes. Default none.
        small: bytes below which a storage is never evicted. Default `SMALL`.
        segments: multiple of a lane's bytes in a segment for waiting lanes. Default 0.
        inside: bytes that all lanes may hold, the running one included; None (default) does not
            limit that one.
    """

    def __init__(
        self,
        capacity: Capacity,
        store: Store,
        device: torch.device,
        meters: Sequence[Meter] = (),
        *,
        small: int = SMALL,
        segments: float = 0,
        inside: LockstepLimits | None = None,
    ) -> None:
        super().__init__(store, device, meters)
        self.capacity = capacity
        self.limit = None if inside is None else inside.limit
        self._later = () if inside is None else inside.segment_extra
        self._makes = () if inside is None else inside.segment_kernel
        self._evicted_next: deque[Held] | None = None
        self._distance: dict[int, int] = {}
        self._segments, self._small = segments, small
        self._records: dict[int, SegmentRecord] = {}
        self._top = 0
        self._segment = self._lane = 0
        self._number: dict[int, int] = {}
        self._made = 0
        self._last: dict[int, int] = {}
        self._next: int | None = None
        self._called = self._noted = 0
        self._stirred = False

    @property
    def waiting(self) -> int:
        """Bytes of those here that were not touched."""
        return self.here - self.touched

    def begin(self, lane: int) -> None:
        """Begin the next segment of a lane that takes the token."""
        self._untouched()
        self.around(lane)

    def around(self, lane: int) -> None:
        """Begin a lane's next segment: evict and prefetch for it.

        Its storages wait from here on, if waiting storages have a capacity of their own.
        """
        if self.limit is None and not self._segments:
            self._untouched()
        self.settle()
        self._segment += 1
        self._lane = lane
        segment = self._number[lane] = self._number.get(lane, 0) + 1
        self._records.setdefault(segment, SegmentRecord(lane))
        limit = self._limit_in(segment)
        self._send_others(min(limit, self._others(lane, segment)), limit, {lane: -1})
        self._called = self._noted = self._made = 0
        self._evicted_next = None
        self._call_next(None if self.limit is None else limit)

    def end(self, lane: int, waiting: Iterable[int]) -> None:
        """End a lane's segment, and evict storages for the next lane."""
        self.settle()
        self._last[lane] = self._segment
        self._untouched()
        order = list(waiting)
        self._next = order[1] if len(order) > 1 else None
        running = order[0] if order else lane
        segment = self._coming(running)
        limit = self._limit_in(segment)
        ahead = 0 if self._next is None else self._shown(self._coming(self._next)).bytes
        other_bytes = min(limit, self._others(running, segment))
        self._distance = {other: place for place, other in enumerate(order)}
        wanted = max(min(in_segment(self.capacity, segment), limit), other_bytes - ahead)
        self._send_others(wanted, limit, self._distance)

    def before(self, keys: Iterable[int]) -> None:
        """Evict storages until a kernel's operands fit, where there is a limit.

        Storages of the next lane are prefetched into the space left after the kernel, and not
        before, even if a copy ends meanwhile: they would take the space that was freed.

        Args:
            keys: of the storages that it needs; they are not evicted.
        """
        assert self.limit is not None
        if self.stirred():
            self._settle()
        needed = set(keys)
        most = self._limit_in(self._number.get(self._lane, 0)) - self._coming_back(needed)
        self.shrink(lambda: self.here, self._first_to_go(needed), most, most)
        if self._stirred:
            self._stirred = False
            self._call_next(most)

    def _coming_back(self, needed: set[int]) -> int:
        """Return the bytes of needed storages that are offloaded; mark others as used last."""
        coming = 0
        for key in needed:
            held = self.all.get(key)
            if held is None or held.pinned:
                continue
            if held.state == OFFLOADED:
                coming += held.size
            elif key in self.movable:  # they are in the order of their last use
                self.movable[key] = self.movable.pop(key)
                if held.state == EVICTING:
                    self.bring_back(held)
        return coming

    def use(self, key: int, writes: bool) -> None:  # noqa: FBT001
        """Make a storage's memory be here, before a kernel runs on it, or writes to it."""
        if self.stirred():
            self._settle()
        held = self.all.get(key)
        if held is None:
            return
        if held.used < self._segment or held.state != RESIDENT:
            if held.lane == self._lane:
                record = self._records[self._number[self._lane]]
                if record.lane == self._lane:
                    record.numbers.append(held.number)
                    record.bytes += held.size
            self.touch(held, self._segment)
            self._note()
        if held.lane != self._lane and not held.pinned:
            self.pin(held)
        if writes and held.has_copy:
            self.forget_copy(held)

    def take(self, key: int, tensor: Tensor) -> None:
        """Take in the storage of a tensor that a kernel has made."""
        if self.stirred():
            self._settle()
        if key in self.all or tensor.device.type != self._device.type:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size < self._small or not storage.resizable():
            return
        self._made += 1  # from the start in every segment: the last lane makes some things for all
        number = (self._number.get(self._lane, 0) << 32) + self._made
        self.register(key, storage, size, self._lane, number, self._segment)
        self._note()

    def keep(self, key: int) -> None:
        """Make a storage resident for good: other code has its address."""
        self.use(key, True)
        held = self.all.get(key)
        if held is not None:
            self.pin(held)

    def _coming(self, lane: int) -> int:
        """Return the number of a lane's next segment."""
        return self._number.get(lane, 0) + 1

    def _shown(self, segment: int, lane: int | None = None) -> SegmentRecord:
        """Return the record of a segment, for a lane if another one has made it."""
        found = self._records.get(segment, NOT_SHOWN)
        return NOT_SHOWN if found.lane == lane else found

    def _untouched(self) -> None:
        """From here on another lane touches storages."""
        self.since, self.touched = self._segment + 1, 0

    def _note(self) -> None:
        if self.touched > self._noted:
            self._noted = self.touched
            record = self._records[self._number[self._lane]]
            record.top, self._top = max(record.top, self._noted), max(self._top, self._noted)

    def _settle(self) -> None:
        self.settle()
        if self.limit is None:
            self._call_next(None)
        else:
            self._stirred = True  # the next kernel's space comes first

    def _first_to_go(self, needed: set[int]) -> Iterator[Held]:
        """Yield the storages to evict while a lane runs: those of waiting lanes, then its own."""
        if self._evicted_next is None:
            self._evicted_next = deque(self._sorted(self._distance))
        while self._evicted_next:
            held = self._evicted_next.popleft()
            key = held.key
            if self.all.get(key) is held and held.used < self.since and key not in needed:
                yield held
        for key, held in list(self.movable.items()):
            if key not in needed:
                yield held

    def _sorted(self, distance: dict[int, int]) -> Iterator[Held]:
        """Yield the storages in memory that were not touched, the first to evict first."""
        found = [held for held in self.movable.values() if held.used < self.since]
        yield from sorted(found, key=lambda held: self._order(held, distance))

    def _limit_in(self, segment: int) -> int:
        """Return the bytes that others may hold during a lane's segment of this number."""
        if self.limit is not None:
            return self.limit + in_segment(self._later, segment)
        return in_segment(self.capacity, segment) + int(self._segments * self._top)

    def _others(self, lane: int, segment: int) -> int:
        """Return the bytes of others to hold next to a lane in a segment; any excess is evicted.

        In a segment that no lane has shown, storages are evicted when its kernels run. In others
        the peak of a lane is after a kernel has made its outputs, for which the limit leaves space.
        """
        limit = self._limit_in(segment)
        if self.limit is None:
            return limit
        most = self._shown(segment, lane).top - in_segment(self._makes, segment)
        return max(0, limit - max(0, most))

    def _ahead(self, lane: int, segment: int) -> int:
        """Return the bytes that others may hold during a segment, prefetched ones included."""
        if self.limit is None or self._shown(segment, lane) is not NOT_SHOWN:
            return self._others(lane, segment)
        return 0

    def _send_others(self, wanted: int, limit: int, distance: dict[int, int]) -> None:
        """Evict storages that have not been touched.

        Args:
            wanted: bytes, above which evictions begin.
            limit: bytes, above which evictions have ended on return.
            distance: how far lanes are from running.
        """
        self.shrink(lambda: self.waiting, self._sorted(distance), wanted, limit)

    def _order(self, held: Held, distance: dict[int, int]) -> tuple[int, int]:
        """Return a sort key: storages needed much later first, then lanes far from their segment.

        Of the lane that runs, at distance -1, its segment has begun.
        """
        segment = self._coming(held.lane) - (distance.get(held.lane, 0) < 0)
        record = self._shown(segment, held.lane)
        if record is not NOT_SHOWN:
            later = held.number not in record.numbers
        else:
            later = held.used < self._last.get(held.lane, 0)
        return (0, held.used) if later else (1, -distance.get(held.lane, 0))

    def _call_next(self, most: int | None) -> None:
        """Prefetch the storages that the next lane will use, as far as recorded and as they fit.

        Args:
            most: bytes that may be resident, those of the running lane included: a smaller lane has
                shown too few for this segment. None where there is no limit.
        """
        if self._next is None or self._next == self._lane:
            return
        numbers = self._shown(self._coming(self._next)).numbers
        limit = self._ahead(self._lane, self._number[self._lane])
        while self._called < len(numbers):
            found = self.numbered.get((self._next, numbers[self._called]))
            if found is not None and found.state == OFFLOADED:
                size = found.size
                if self.waiting + size > limit or (most is not None and self.here + size > most):
                    return
                self.prefetch(found)
            self._called += 1


def key_of(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage; None where it has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a subclass that only wraps others
        return None


# Shows every kernel of a lane to the pager, before and after it runs.
#
# A dispatch mode intercepts each of them, in forward and in backward. That costs as much as a small
# kernel, so there is no such mode where nothing will be evicted (`anybatch.lockstep.lockstep`).

PLAIN = frozenset({Tensor, Parameter})
STRIDED = torch.strided


class KernelObserver(Protocol):
    """Protocol of an observer of every kernel: a pager, or a recorder of calls to one."""

    limit: int | None

    def before(self, keys: Iterable[int]) -> None:
        """Evict storages until a kernel's operands fit, where there is a limit."""

    def use(self, key: int, writes: bool) -> None:  # noqa: FBT001
        """Make a storage's memory be here, before a kernel runs on it, or writes to it."""

    def take(self, key: int, tensor: Tensor) -> None:
        """Take in the storage of a tensor that a kernel has made."""

    def keep(self, key: int) -> None:
        """Bring a storage's memory back for good."""

    def release(self, key: int) -> None:
        """Make a storage resident, and stop tracking it: another owner moves it from now on."""


class Paging(DispatchMode):
    """Dispatch mode that makes operands of kernels resident, and registers their results."""

    def __init__(self, pager: KernelObserver) -> None:
        super().__init__()
        self.pager = pager
        self._writes: dict[Any, bool] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False to omit the guard against compilation; compiled models are refused."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a kernel's operands resident, run it, and register its results."""
        writes = self._writes.get(func)
        if writes is None:
            schema = getattr(func, "_schema", None)
            writes = self._writes[func] = schema is None or schema.is_mutable
        pager, kwargs = self.pager, kwargs or {}
        with torch._C.DisableTorchFunction():
            if pager.limit is not None:
                pager.before(_keys((args, kwargs)))
            operands = set()
            for tensor in tensors_in((args, kwargs) if kwargs else args):
                if plain(tensor):
                    key = key_of(tensor)
                    operands.add(key)
                    if key is not None:
                        pager.use(key, writes)
                else:
                    keep(pager, tensor)
            result = func(*args, **kwargs)
            for tensor in tensors_in(result):
                if not plain(tensor):
                    keep(pager, tensor)
                elif (key := key_of(tensor)) is not None and key not in operands:
                    pager.take(key, tensor)
        return result


def keep(pager: KernelObserver, tensor: Tensor) -> None:
    """Make a tensor resident for good: other code has its address."""
    for inner in _inside(tensor):
        key = key_of(inner)
        if key is not None:
            pager.keep(key)


def _keys(values: Any) -> Iterator[int]:
    """Yield the addresses of the storages that a kernel needs."""
    for tensor in tensors_in(values):
        for inner in _inside(tensor):
            key = key_of(inner)
            if key is not None:
                yield key


def plain(tensor: Tensor) -> bool:
    """Return whether a tensor is strided and no wrapper of others, so that it has one storage."""
    wraps = type(tensor) not in PLAIN and hasattr(tensor, "__tensor_flatten__")
    return not wraps and tensor.layout is STRIDED


def _inside(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the strided tensors that a tensor is made of."""
    if type(tensor) not in PLAIN and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _inside(getattr(tensor, name))
    else:
        yield from parts_of_sparse(tensor) or (tensor,)
