"""Storages that leave the device while their lane waits, and return when a kernel asks for them.

``saved_tensors_hooks`` move what autograd saves, and nothing else: what Python holds at a meeting
(inputs, the branch of a residual, the tensor that is normalised) would stay, a fifth of the whole
batch's peak however small the micro-batches. Here a tensor keeps its storage, and the storage gives
its memory away: its bytes are copied out, and it is resized to nothing. Every kernel is seen before
it runs, in forward and in backward, and what it needs is brought back first.

    lane 0 runs ── meets ── its storages leave, the furthest next use first ── ... ── its turn: they
    return one by one, when they are used; what was not written to need not be copied out again
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from anybatch.meter import Meter, tensors_in
from anybatch.stores import Store

SMALL = 256
"""Bytes below which a storage stays: its copies would cost more than it holds."""


@dataclass
class Held:
    """One storage of a lane.

    Attributes:
        storage: a weak reference; it is not kept alive here.
        size: bytes.
        lane: whose it is.
        used: the turn in which it was used last.
        away: it has no memory now.
        kept: a copy of its bytes is in the store.
        stays: more than one lane has used it.
    """

    storage: Any
    size: int
    lane: int
    used: int
    away: bool = False
    kept: bool = False
    stays: bool = False


class Pager:
    """Keeps what waiting lanes hold on the device within `room`.

    Args:
        room: bytes.
        store: where the rest goes.
        device: of the storages; others stay.
        meters: count what is here. Default none.

    Attributes:
        moved: bytes that were copied out and in.
    """

    def __init__(
        self, room: int, store: Store, device: torch.device, meters: Sequence[Meter] = ()
    ) -> None:
        self.room, self._store, self._meters = room, store, meters
        self._device = device.type
        self.moved = 0
        self._held: dict[int, Held] = {}
        self._movable: dict[int, Held] = {}
        self._dead: deque[int] = deque()
        self._turn = 0
        self._lane = 0
        self._here = 0
        self._last: dict[int, int] = {}

    def begin(self, lane: int) -> None:
        """A lane takes its turn."""
        self._bury()
        self._turn += 1
        self._lane = lane

    def leave(self, lane: int, waiting: Iterable[int]) -> None:
        """A lane's turn is over.

        Args:
            lane: which.
            waiting: all lanes, the one that runs next first.
        """
        self._bury()
        self._last[lane] = self._turn
        distance = {other: place for place, other in enumerate(waiting)}
        if self._here <= self.room:
            return
        here = sorted(self._movable.items(), key=lambda pair: self._order(pair[1], distance))
        for key, held in here:
            if self._here <= self.room:
                return
            self._send_away(key, held)

    def _order(self, held: Held, distance: dict[int, int]) -> tuple[int, int]:
        """Sort what backward needs much later first, then lanes that are far from their turn."""
        if held.used < self._last.get(held.lane, 0):
            return 0, held.used
        return 1, -distance[held.lane]

    def use(self, tensor: Tensor, *, writes: bool) -> None:
        """Make a tensor's memory be here, before a kernel runs on it."""
        self._bury()
        key = _key(tensor)
        held = self._held.get(key) if key is not None else None
        if key is None or held is None:
            return
        held.used = self._turn
        if held.away:
            self._bring_back(key, held)
        if held.lane != self._lane and not held.stays:
            held.stays = True
            self._settle(key, held)
        if writes:
            self._forget_copy(key, held)

    def take(self, tensor: Tensor) -> None:
        """Take in the storage of a tensor that a kernel has made."""
        self._bury()
        key = _key(tensor)
        if key is None or key in self._held or tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size < SMALL or not storage.resizable():
            return
        watch = weakref.ref(storage, partial(self._died, key))
        held = self._held[key] = Held(watch, size, self._lane, self._turn)
        self._arrive(key, held)

    def keep(self, tensor: Tensor) -> None:
        """Bring a tensor's memory back for good: its address is known to somebody."""
        for inner in _inside(tensor):
            self.use(inner, writes=True)
            key = _key(inner)
            held = self._held.get(key) if key is not None else None
            if key is not None and held is not None:
                held.stays = True
                self._settle(key, held)

    def close(self) -> None:
        """Bring back what still lives, and forget all of it."""
        try:
            self._bury()
            for key, held in list(self._held.items()):
                if held.away and held.storage() is not None:
                    self._bring_back(key, held)
        finally:
            self._held.clear()
            self._movable.clear()
            self._store.close()

    def _send_away(self, key: int, held: Held) -> None:
        storage = held.storage()
        if storage is None:
            return
        if not storage.resizable():
            held.stays = True
            self._settle(key, held)
            return
        with _unseen():
            if storage.nbytes() != held.size:
                self._forget_copy(key, held)
                self._settle(key, held)
                held.size = storage.nbytes()
            if not held.kept:
                self._store.put(key, _flat(storage))
                held.kept = True
                self.moved += held.size
            storage.resize_(0)
            for meter in self._meters:
                meter.resized(storage)
        held.away = True
        self._settle(key, held)

    def _bring_back(self, key: int, held: Held) -> None:
        storage = held.storage()
        with _unseen():
            storage.resize_(held.size)
            self._store.get(key, _flat(storage))
        self.moved += held.size
        held.away = False
        if not held.stays:
            self._arrive(key, held)

    def _bury(self) -> None:
        """Forget what has died; the garbage collector may come in the middle of anything."""
        while self._dead:
            key = self._dead.popleft()
            held = self._held.pop(key, None)
            if held is not None:
                self._settle(key, held)
                self._forget_copy(key, held)

    def _forget_copy(self, key: int, held: Held) -> None:
        if held.kept:
            self._store.drop(key)
            held.kept = False

    def _died(self, key: int, _watch: Any) -> None:
        self._dead.append(key)

    def _arrive(self, key: int, held: Held) -> None:
        """Count what is here and may be sent away."""
        self._movable[key] = held
        self._here += held.size

    def _settle(self, key: int, held: Held) -> None:
        """Count it no more: it is away, gone, or stays."""
        if self._movable.pop(key, None) is not None:
            self._here -= held.size


class Paging(TorchDispatchMode):
    """Shows every kernel of a lane to the pager, before and after it runs."""

    supports_higher_order_operators = True

    def __init__(self, pager: Pager) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pager = pager

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Bring in what a kernel needs, run it, and take in what it has made."""
        kwargs = kwargs or {}
        pager = self._pager
        schema = getattr(func, "_schema", None)
        writes = schema is None or schema.is_mutable
        with torch._C.DisableTorchFunction():
            given = set()
            for tensor in tensors_in((args, kwargs)):
                if tensor.layout == torch.strided and not _wraps(tensor):
                    given.add(_key(tensor))
                    pager.use(tensor, writes=writes)
                else:
                    pager.keep(tensor)
            result = func(*args, **kwargs)
            for tensor in tensors_in(result):
                if tensor.layout != torch.strided or _wraps(tensor):
                    pager.keep(tensor)
                elif _key(tensor) not in given:
                    pager.take(tensor)
        return result


@contextmanager
def _unseen() -> Iterator[None]:
    """Compute past all modes, without gradients."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def _wraps(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, Parameter) and hasattr(tensor, "__tensor_flatten__")


def _inside(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the strided tensors that a tensor is made of."""
    if _wraps(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            yield from _inside(getattr(tensor, name))
    elif tensor.layout == torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor


def _flat(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _key(tensor: Tensor) -> int | None:
    if tensor.layout != torch.strided:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a subclass that only wraps others
        return None
