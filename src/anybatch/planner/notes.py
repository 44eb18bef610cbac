"""Record of the storages that each phase of a lane touches, in place of a pager.

A pager (`anybatch.memory.pager`) gets the inputs and outputs of every kernel. The recorder here
gets the same, and only records it: for each storage of the lane the phase that needed it last,
until it dies. A barrier of one lane ends a phase where BatchNorm would wait.

    use, take ──> phase of each storage ──> untouched: those of earlier phases
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anybatch.core.accelerator import home
from anybatch.core.moments import Moments
from anybatch.core.optimizers import rounded


class Noted:
    """Storage of a lane: its bytes, the last phase to touch it, and whether it is evictable."""

    __slots__ = ("phase", "shared", "size", "stays", "watch")

    def __init__(self, size: int, phase: int, *, shared: bool) -> None:
        self.size, self.phase, self.shared, self.stays = size, phase, shared, False
        self.watch: Any = None


class StorageRecorder:
    """Recorder of storages with the interface of a pager, which evicts nothing.

    Args:
        device: of the storages that could be evicted.

    Attributes:
        limit: None, as for a pager that keeps to none within a phase.
        phase: of the lane, from 0.
        unknown: the lane was at a barrier that is not BatchNorm's.
        ever: sizes of the storages that there were in this phase, and how many of each.
    """

    def __init__(self, device: torch.device) -> None:
        self.limit: int | None = None
        self.phase, self.unknown = 0, False
        self._device, self._sharing = device.type, False
        self._all: dict[int, Noted] = {}
        self.ever: Counter[int] = Counter()

    def before(self, keys: Iterable[int]) -> None:
        """There is no limit to keep to."""

    def use(self, key: int, writes: bool) -> None:  # noqa: FBT001
        """Record that a kernel of this phase needs a storage."""
        del writes
        if key in self._all:
            self._all[key].phase = self.phase

    def take(self, key: int, tensor: Tensor) -> None:
        """Record a storage that a kernel of this phase has made."""
        if key in self._all or tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        noted = self._all[key] = Noted(
            rounded(storage.nbytes(), tensor.device), self.phase, shared=self._sharing
        )
        self.ever[noted.size] += 1
        noted.watch = weakref.ref(storage, partial(self._died, key))

    def keep(self, key: int) -> None:
        """Record that a storage cannot be evicted any more."""
        self.use(key, True)
        if key in self._all:
            self._all[key].stays = True

    def give_up(self, key: int) -> None:
        """Forget a storage that has another owner from now on."""
        self._all.pop(key, None)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Record storages made in the body as memory that all lanes share."""
        self._sharing = True
        try:
            yield
        finally:
            self._sharing = False

    def sizes(self) -> Counter[int]:
        """Return the sizes of the storages that there are, and how many of each."""
        return Counter(one.size for one in self._all.values())

    @property
    def untouched(self) -> int:
        """Bytes that this phase has not touched, and that may be evicted."""
        return sum(one.size for one in self._offloading() if one.phase < self.phase)

    @property
    def holds(self) -> int:
        """Bytes that may be evicted."""
        return sum(one.size for one in self._offloading())

    @property
    def accounted(self) -> int:
        """Bytes that all lanes share, or that may be evicted."""
        return sum(one.size for one in self._all.values() if one.shared or not one.stays)

    def _offloading(self) -> Iterator[Noted]:
        return (one for one in self._all.values() if not (one.stays or one.shared))

    def _died(self, key: int, _watch: Any) -> None:
        self._all.pop(key, None)


class SingleLaneBarrier:
    """Barrier of a single lane, with results of the same shapes as for all lanes.

    Args:
        notes: of the lane.
        ended: called where a phase has ended.
    """

    def __init__(self, notes: StorageRecorder, ended: Callable[[], None]) -> None:
        self._notes, self._ended = notes, ended

    def reduce(
        self,
        key: Any,
        part: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        finish: Callable[[Any], Any],
    ) -> Any:
        """End a phase; the value reduced over all parts is made once for all lanes."""
        del key, add
        own = part()
        self._ended()
        with self._notes.sharing():
            total = finish(own)
            if isinstance(total, Moments):
                _ = total.variance  # it is kept with them
        return total

    def exchange(self, key: Any, part: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Combine the part of this lane only, and mark the memory of all lanes as undetermined."""
        del key
        self._notes.unknown = True
        return combine([part])[0]

    def gather(self, key: Any, rows: Tensor) -> tuple[Tensor, int]:
        """The same."""
        del key
        self._notes.unknown = True
        return rows, 0


def shapes_of_moments(rows: Tensor) -> Moments:
    """Return moments as they are made of rows with data, past all modes: mean 0 and variance 1.

    They count one value more a channel, as there are other rows.
    """
    mean = rows.new_zeros(rows.shape[1], dtype=torch.float64, device=home(rows.device))
    count = rows.numel() // max(rows.shape[1], 1) + 1
    return Moments(count, mean, torch.full_like(mean, count))
