"""Paged parameters and gradients: pages, their order, and the mode that brings them in.

Hooks on modules would miss a weight that another module uses (attention uses its projection's),
tied weights, `functional_call` and recomputations in backward. A dispatch mode intercepts every
kernel of its thread, forward, backward and in an optimizer; a function mode intercepts reads of a
tensor's address. Both are active only while the context is entered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anybatch.core import optimizers
from anybatch.core.hooks import service
from anybatch.core.modules import DispatchMode, keywords
from anybatch.core.norm import ESCAPES
from anybatch.core.optimizers import rounded
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError
from anybatch.memory.lane_pager import Paging, key_of, plain
from anybatch.memory.meter import Meter, tensors_in, written_by
from anybatch.memory.pager import EVICTING, OFFLOADED, PREFETCHING, RESIDENT, Held, Pager
from anybatch.memory.stores import Store
from anybatch.offloading.state_mover import StateMover

DETACH = torch.ops.aten.detach.default
"""The one kernel that reads no memory."""

PARAMETER, GRADIENT = range(2)
"""The roles of pages."""


class PagedModel:
    """The parameters of a model and their gradients, in a bounded memory.

    Args:
        model: whose.
        limit: bytes of them that may be in memory at a time.
        make: returns the store where the others go.
        meters: count the resident bytes. Default none.

    Attributes:
        pages: which are here.
    """

    def __init__(
        self, model: nn.Module, limit: int, make: Callable[[], Store], meters: Sequence[Meter] = ()
    ) -> None:
        self._model, self._limit, self._make, self._meters = model, limit, make, meters
        self._stack = ExitStack()
        self._removers: dict[int, Callable[[], None]] = {}

    def enter(self) -> None:
        """Begin to see kernels, of this thread."""
        device = next(self._model.parameters()).device
        self.pages = ParameterPager(self._make(), device, self._meters, self._limit)
        with ExitStack() as stack:
            stack.callback(self.pages.close)
            self.register_new()
            stack.callback(self._unhook)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(_Addresses(self.pages))
            stack.enter_context(_PageInMode(self.pages))
            self._stack = stack.pop_all()

    def exit(self) -> None:
        """Bring everything back, and see nothing more."""
        self._stack.close()

    def register_new(self) -> None:
        """Take in parameters and gradients that are new."""
        with torch._C.DisableTorchFunction():
            for number, parameter in enumerate(self._model.parameters()):
                if is_lazy(parameter) or not plain(parameter):
                    continue
                self._take(parameter, PARAMETER, number)
                if parameter.requires_grad and id(parameter) not in self._removers:
                    self._hook(parameter, number)
                if parameter.grad is not None:
                    self._take(parameter.grad, GRADIENT, number)

    def _take(self, tensor: Tensor, role: int, number: int) -> None:
        key = _key(tensor)
        if key is not None:
            for mode in _get_current_dispatch_mode_stack():
                if isinstance(mode, Paging):  # a lane has made this gradient
                    mode.pager.release(key)
            self.pages.add(key, tensor.untyped_storage(), role, number)

    def _hook(self, parameter: Tensor, number: int) -> None:
        @service
        def accumulated(leaf: Tensor) -> None:
            with torch._C.DisableTorchFunction():
                if leaf.grad is not None:
                    self._take(leaf.grad, GRADIENT, number)

        handle = parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
        self._removers[id(parameter)] = handle.remove

    def _unhook(self) -> None:
        while self._removers:
            self._removers.popitem()[1]()


class _PageInMode(DispatchMode):
    """Has the operands of every kernel brought in before it runs.

    Attributes:
        pages: the same; read by forecasts (`anybatch.memory.fakes`).
    """

    def __init__(self, pages: ParameterPager) -> None:
        super().__init__()
        self.pages = pages

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Disable the guard against compilation: compiled code runs eagerly here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Bring in the storages of a kernel, and run it; torch refuses views of no memory."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            accesses = [] if func is DETACH else _accesses(func, args, kwargs)
            if not accesses:
                return func(*args, **kwargs)
            halves = [] if self.pages.fit(accesses) else _halves(func, args, kwargs)
            if not halves:
                self.pages.use(accesses, str(func))
                return func(*args, **kwargs)
        found = [self.__torch_dispatch__(func, types, *half) for half in halves]
        return None if found[0] is None else [*found[0], *found[1]]


def _halves(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the two calls that a kernel for many tensors is; none for any other kernel.

    Each of its results is of one tensor of every list, as in `clip_grad_norm_`.
    """
    count = len(args[0]) if args and isinstance(args[0], list | tuple) else 0
    if count < 2 or not str(func).startswith("aten._foreach_"):
        return []

    def part(value: Any, which: slice) -> Any:
        return value[which] if isinstance(value, list | tuple) and len(value) == count else value

    return [
        (tuple(part(v, half) for v in args), {k: part(v, half) for k, v in kwargs.items()})
        for half in (slice(0, count // 2), slice(count // 2, count))
    ]


def _accesses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, bool]]:
    """Return the keys of the storages in a call, and whether they are written to.

    A kernel without a schema may write to all of them.
    """
    keys = list(_keys((*args, kwargs)))
    schema = getattr(func, "_schema", None)
    written = set(keys if schema is None else _keys(list(written_by(func, args, kwargs))))
    return [(key, key in written) for key in keys]


class _Addresses(TorchFunctionMode):
    """Function mode that makes a tensor permanently resident when its address is requested."""

    def __init__(self, pages: ParameterPager) -> None:
        self._pages = pages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make tensors permanently resident for a function that requests their address."""
        if func in ESCAPES:
            with torch._C.DisableTorchFunction():
                for key in _keys(args):
                    self._pages.keep(key)
        return func(*args, **keywords(func, kwargs))


def _keys(value: Any) -> Iterator[int]:
    for tensor in tensors_in(value):
        key = _key(tensor)
        if key is not None:
            yield key


def _key(tensor: Tensor) -> int | None:
    """Return the key of a tensor that is materialised and has a single storage; else None."""
    return None if is_lazy(tensor) or not plain(tensor) else key_of(tensor)


# ParameterPager of parameters and gradients in bounded memory: evicted, and prefetched before use.
#
# A tensor retains its storage, and the storage frees its memory (`anybatch.memory.pager`), so
# views that autograd has saved, tied weights and references remain valid. Before a kernel runs, the
# tensors that it reads are made resident; those with the latest next use are evicted (Belady's
# rule, by the order of the step before, in the first step the least recently used), without a write
# if their copy is still valid.
#
# Source: Hayakawa and Narihira, Out-of-core training, section 3; Belady (1966).

WINDOW = 256
"""Number of future uses that are considered."""


class ParameterPager(Pager):
    """Pager that keeps the storages of parameters and gradients within a number of bytes.

    Args:
        store: where the others go.
        device: of the storages.
        meters: count the resident bytes.
        limit: bytes that may be in memory at a time.

    Attributes:
        limit: those bytes.
        most: the most bytes that were here at a time.
    """

    of, then = StateMover.of, StateMover.then

    def __init__(
        self, store: Store, device: torch.device, meters: Sequence[Meter], limit: int
    ) -> None:
        super().__init__(store, device, meters)
        self.limit, self.most, self._order = limit, 0, Order()
        self._clock = self._front = 0
        self.since = 1 << 62  # no lane ever gets there: none of its own is held back

    @property
    def resident(self) -> int:
        """Bytes that are here now, of pinned storages, too."""
        return self.here + self.pinned

    def fit(self, accesses: list[tuple[int, bool]]) -> bool:
        """Say whether storages may be here together."""
        sizes = {key: self.all[key].size for key, _ in accesses if key in self.all}
        return sum(sizes.values()) + self.pinned <= self.limit

    def add(self, key: int, storage: Any, role: int, number: int) -> None:
        """Take in a storage that is here, under a name that is the same in every step."""
        self.settle()
        size = storage.nbytes()
        if key in self.all or size < optimizers.SMALL or not storage.resizable():
            return
        self._clock += 1
        self._free(rounded(size, self._device), "a tensor")
        self.register(key, storage, size, role, number, self._clock)
        self._note((role, number))

    def use(self, accesses: list[tuple[int, bool]], name: str) -> None:
        """Make storages be here, before a kernel runs on them.

        Raises:
            BudgetError: all of them together are more than the limit.
        """
        self.settle()
        pages = [(self.all[key], writes) for key, writes in accesses if key in self.all]
        if not pages:
            return
        self._clock += 1
        for held, _ in pages:
            held.used = self._clock
        for held, writes in pages:
            if held.state == OFFLOADED:
                self._free(held.size, name)
            if held.state != RESIDENT:
                self.bring_back(held)
            if writes and held.has_copy:
                self.forget_copy(held)
            self._note((held.lane, held.number))
        if self._front < len(self._order):
            self._prefetch()

    def keep(self, key: int) -> None:
        """Make a storage permanently resident, because its address was read."""
        self.use([(key, True)], "a read of its address")
        held = self.all.get(key)
        if held is not None:
            self.pin(held)

    def squeeze(self, limit: int) -> None:
        """Set the budget, and evict until the resident bytes are within it."""
        self.limit = limit
        self._clock += 1
        self._free(0, "what stays")

    def ended(self) -> None:
        """A step is over."""
        self._order.ended()
        self._front = 0

    def _note(self, item: tuple[int, int]) -> None:
        self.most = max(self.most, self.resident)
        self._order.used(item)

    def _free(self, size: int, name: str) -> None:
        """Evict until so many bytes fit in the budget."""
        left = self.limit - size
        self.shrink(lambda: self.resident, self._furthest(-1), left, left)
        if (needed := self.resident + size) > self.limit:
            raise BudgetError(
                f"the parameters and gradients that a kernel reads must fit in memory, and {name} "
                f"needs {show_bytes(needed)} at once, and {show_bytes(self.limit)} is reserved: "
                f'give memory="{-(-needed // 1024)}KiB" or more for them, or have fewer read at a '
                "time",
                needed=needed,
                budget=self.limit,
            )

    def _furthest(self, beyond: int) -> Iterator[Held]:
        """Yield the storages to evict: the latest next use first, as far as beyond a place."""
        while True:
            self.settle()  # what has died cannot leave
            best, last = None, (beyond, 0)
            for held in self.movable.values():
                if held.used < self._clock and held.state in (RESIDENT, PREFETCHING):
                    later = self._order.next((held.lane, held.number)), -held.used
                    if later[0] > beyond and (best is None or later > last):
                        best, last = held, later
            if best is None:
                return
            yield best

    def _prefetch(self) -> None:
        """Prefetch the storages used next, while they fit or later ones can be evicted."""
        order = self._order
        self._front = max(self._front, order.at)
        while self._front < min(len(order), order.at + WINDOW):
            found = self.numbered.get(order[self._front])
            if found is not None and found.state == OFFLOADED:
                left = self.limit - found.size
                self.shrink(lambda: self.resident, self._furthest(self._front), left, inf)
                if self.resident > left:
                    return
                self.prefetch(found)
                self.most = max(self.most, self.resident)
            elif found is not None and found.state == EVICTING:
                self.bring_back(found)
            self._front += 1


# In which order things are used, step after step, as the step before has shown.
#
# A training step repeats itself: uses follow each other in the order of the last step. In a step
# with another order only the prediction is wrong.

Use = tuple[int, int]
"""A used tensor: its role, and its number."""


class Order:
    """Uses of one step, and those of the step before it.

    Attributes:
        at: how many of the uses of the step before lie behind.
    """

    def __init__(self) -> None:
        self.at = 0
        self._previous: list[Use] = []
        self._places: dict[Use, list[int]] = {}
        self._now: list[Use] = []

    def __len__(self) -> int:
        return len(self._previous)

    def __getitem__(self, place: int) -> Use:
        """Return the use at a place of the step before."""
        return self._previous[place]

    def used(self, item: Use) -> None:
        """Note a use."""
        if self._now and self._now[-1] == item:
            return
        self._now.append(item)
        places = self._places.get(item, [])
        index = bisect_left(places, self.at)
        if index < len(places):
            self.at = places[index] + 1

    def next(self, item: Use) -> int:
        """Return the place of the next use: in this step, else in the one behind it, else later."""
        places = self._places.get(item)
        if not places:
            return 2 * len(self._previous)
        index = bisect_left(places, self.at)
        return places[index] if index < len(places) else len(self._previous) + places[0]

    def ended(self) -> None:
        """A step is over; the next one will be like it."""
        self._previous, self._now, self.at = self._now, [], 0
        self._places = {}
        for place, item in enumerate(self._previous):
            self._places.setdefault(item, []).append(place)
