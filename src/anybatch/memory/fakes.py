"""A step's tensors without data: the user's model, loss, optimizer and batch, as fakes.

torch's FakeTensorMode runs every kernel on shapes only. A model built under it would not be the
user's, and ``functional_call`` on the user's lets a module store a fake in an attribute. So the
model is copied with its tensors replaced: the copy shares no tensor with the original, costs no
memory, and is discarded.

    model ──deepcopy, parameter -> fake parameter──> fake model      the same for loss and optimizer
"""

from __future__ import annotations

import copy
import gc
import logging
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import _lru_cache_wrapper, cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anybatch.core import optimizers, pytree
from anybatch.core.hooks import service
from anybatch.core.modules import keywords, local, storage_of
from anybatch.core.transaction import HeldBack, uninterrupted
from anybatch.memory import fake_values
from anybatch.memory.lane_pager import key_of
from anybatch.memory.meter import Meter, tensors_in

T = TypeVar("T")
OTHERS = frozenset(
    {int, float, bool, complex, str, type(None)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types that hold no tensor; every kernel has some."""
REPORTS = logging.getLogger("torch._subclasses.fake_tensor")
"""torch reports each kernel here that does not run without data, with its frames."""


class Fakes:
    """One world of fake tensors; the same real tensor is always the same fake.

    Args:
        masks_full: count a selection by a mask as if all of the mask were true. Default False: it
            raises torch's error, because its size depends on values.
        values: integers derive from those of the batch, whose tensors are held, where a package
            reads them (`anybatch.memory.fake_values`). Default False: a read raises torch's error.

    Attributes:
        mode: the mode under which fakes are computed with. Real tensors that a closure holds may
            meet them, and become fakes in the result.
    """

    def __init__(self, *, masks_full: bool = False, values: bool = False) -> None:
        values = values and fake_values.is_read()
        self.mode = CachedFakeMode(masks_full=masks_full, values=values)
        self._memo: dict[int, Any] = {}
        self._caches: list[weakref.ref[Any]] | None = None
        self._missed: list[int] = []
        self._originals: list[Any] = []  # an id is only a name while its object lives

    @contextmanager
    def entered(self) -> Iterator[FakeTensorMode]:
        """Run the body with fake tensors; clear each ``functools.cache`` that then holds some."""
        if self._caches is None:  # a walk over all objects, so only where a model is run
            # Weakly: a cache may hold another engine's model (test_engines_go_with_their_models).
            self._caches = list(map(weakref.ref, caches()))
            self._missed = [_misses(cached()) for cached in self._caches]
        try:
            with interrupted_between_functions(), unreported(), fake_values.read(), self.mode:
                yield self.mode
        finally:
            for place, reference in enumerate(self._caches):
                cached = reference()
                if cached is not None and _misses(cached) != self._missed[place]:
                    if _holds_fake(cached):
                        cached.cache_clear()
                    self._missed[place] = _misses(cached)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the fake of a tensor, with no gradient; of a spread one, of this rank's part."""
        if id(tensor) not in self._memo:
            self._originals.append(tensor)
            with paged().here_for(tensor):  # an empty storage would give an empty fake
                part = self.mode.from_tensor(local(tensor))
            same = part.requires_grad == tensor.requires_grad
            self._memo[id(tensor)] = part if same else part.requires_grad_()
        fake: Tensor = self._memo[id(tensor)]
        return fake

    def copy(self, value: T, modules: Iterable[nn.Module]) -> T:
        """Return a copy of `value` with fake tensors.

        Args:
            value: a model or a loss.
            modules: the modules in it; their parameters, buffers and other tensors are replaced.

        Raises:
            Exception: any error of `copy.deepcopy`; not everything can be copied.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch asks a result that is kept for its gradient
            for module in modules:
                for held in (module._parameters, module._buffers, module.__dict__):
                    for tensor in dict(held).values():
                        if isinstance(tensor, Tensor):
                            self.of(tensor)
            with FakeCopyMode(self.mode):  # tensors in lists and the like
                return copy.deepcopy(value, self._memo)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
        """Return a copy that has not stepped yet, of fake parameters; it makes its state anew.

        Returns:
            None for an optimizer that is not torch's own: it may hold another one, and step that.
        """
        if not type(optimizer).__module__.startswith("torch.optim."):
            return None
        cls = type(optimizer)
        twin = cls.__new__(cls)
        twin.__setstate__({**cls.__getstate__(optimizer), "state": defaultdict(dict)})
        twin.param_groups = [
            {**group, "params": [self.of(parameter) for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        return twin

    def rows(self, batch: Any, size: int, count: int) -> Any:
        """Return `count` rows like those of `batch`: fakes for tensors, repeated rows for the rest.

        They lie in memory as those of `batch` do: kernels copy some that do not lie densely.

        Args:
            batch: tree whose tensors have `size` rows.
            size: its rows.
            count: rows wanted, more or fewer.
        """

        def one(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._rows(leaf, count)
            if isinstance(leaf, np.ndarray) and leaf.ndim:
                return leaf[np.arange(count) % size]
            if isinstance(leaf, list | tuple) and len(leaf) == size:
                return type(leaf)(leaf[i % size] for i in range(count))
            return leaf

        return pytree.map_leaves(one, batch)

    def _rows(self, leaf: Tensor, count: int) -> Tensor:
        if leaf.dim() == 0:
            return self.of(leaf)
        shape = (count, *leaf.shape[1:])
        with self.mode:
            if leaf.layout != torch.strided or leaf.is_contiguous():
                rows = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
            else:
                strides = _strides(leaf, count)
                rows = torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)
        if self.mode.values:
            fake_values.begin(rows, leaf)
        return rows.requires_grad_(leaf.requires_grad)


def _strides(leaf: Tensor, count: int) -> tuple[int, ...]:
    """Return how `count` rows would lie in memory that lie like those of `leaf`."""
    times = -(-count // max(1, len(leaf)))
    row, *others = leaf.stride()
    return (row, *(stride if stride <= row else stride * times for stride in others))


@contextmanager
def uncached() -> Iterator[None]:
    """Run the body without the cache of fake tensors: its entry for ``set_`` holds the storage."""
    modes = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, FakeTensorMode)]
    before = [mode.cache_enabled for mode in modes]
    for mode in modes:
        mode.cache_enabled = False
    try:
        yield
    finally:
        for mode, enabled in zip(modes, before, strict=True):
            mode.cache_enabled = enabled


BY_NUMBER = frozenset((Tensor.apply_, Tensor.map_, Tensor.map2_))
"""Functions that call Python for each number: torch reads these in the memory that a fake lacks."""


class _Listens(TorchFunctionMode):
    """Function mode that handles pending signals before each function of torch.

    Raises:
        NotImplementedError: a function that would end the process.
    """

    def __init__(self, held: HeldBack) -> None:
        super().__init__()
        self._held = held

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._held.let_through()
        if func in BY_NUMBER:
            raise NotImplementedError(f"{func.__name__} reads numbers, and there are none")
        return func(*args, **keywords(func, kwargs))


@contextmanager
def interrupted_between_functions() -> Iterator[None]:
    """Raise Ctrl-C only between functions of torch while the body computes with fakes.

    Kernels ask a fake for its device, which is Python code. An error in there ends the process.
    """
    with uninterrupted() as held, _Listens(held):
        yield


@contextmanager
def unreported() -> Iterator[None]:
    """Silence torch's report of kernels that need data: the caller expects and catches these."""
    before = REPORTS.disabled
    REPORTS.disabled = True  # another level would empty the caches of all loggers of the process
    try:
        yield
    finally:
        REPORTS.disabled = before


def caches() -> list[Any]:
    """Return every ``functools.cache`` that there is."""
    every = gc.get_referrers(_lru_cache_wrapper)  # an object of a class made on the heap has it
    return [one for one in every if type(one) is _lru_cache_wrapper]


def _misses(cached: Any) -> int:
    """Return the number of misses of a cache; 0 where it is gone."""
    return 0 if cached is None else int(cached.cache_info().misses)


def forget_fakes() -> None:
    """Empty every ``functools.cache`` that holds a tensor without data."""
    for cached in caches():
        if cached.cache_info().currsize and _holds_fake(cached):
            cached.cache_clear()


def is_fake(value: Any) -> bool:
    """Say whether a tensor has a shape and no data."""
    return isinstance(value, FakeTensor)


def _holds_fake(cached: Any, depth: int = 4) -> bool:
    """Return whether a cache has a fake tensor in it, or in a few levels of its entries."""
    inside = gc.get_referents(cached)
    if depth == 0:
        return False
    kinds = (list, tuple, dict)
    return any(is_fake(o) or (isinstance(o, kinds) and _holds_fake(o, depth - 1)) for o in inside)


# Results of kernels on fakes, derived once for each shape.
#
# A dry run calls the same kernels on the same shapes many times: layer by layer, micro-batch by
# micro-batch. torch keeps what it has derived, and the search in it takes half of a dry run. So
# results are found here first, by a shorter key:
#
#     kernel, shapes, strides, dtypes, numbers ──cached──> empty results, or the argument written to
#                                              ──else────> torch derives them, and they are kept
#     a view ───────────────────────────────────────────> torch's kernel for it, on shapes
#
# Kernels whose results depend on values, and tensors other than dense fakes, always go to torch
# (test_cached_results_are_those_that_torch_derives).

MOST_CACHED = 1 << 15
"""Calls of kernels that are kept at most."""

TO_TORCH = {
    *(torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape),
    *(torch.Tag.inplace_view, torch.Tag.maybe_aliasing_or_mutating),
}
"""Tags of kernels whose results depend on values, or whose arguments change their shapes."""

SELECTIONS = frozenset(
    (
        torch.ops.aten.nonzero.default,
        torch.ops.aten.index.Tensor,
        torch.ops.aten.masked_select.default,
    )
)
"""Kernels whose results are as large as a mask has numbers that are true."""

BY_NAME = (
    *("aten::lift", "aten::_resize", "aten::as_strided", "aten::view_copy"),
    *("aten::slice_scatter", "aten::select_scatter", "aten::diagonal_scatter"),
)
"""The same, without such a tag, or on the place in a storage where an argument begins."""

CachedResult = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device] | int | None
"""Shape, strides, dtype and device of a result; or the argument that it is; or no tensor."""


class CachedFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake mode that keeps the results of kernels."""

    def __init__(self, *, masks_full: bool = False, values: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.masks_full, self.values = masks_full, values
        self._cached: dict[Any, tuple[type | None, list[CachedResult]] | None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the results of one kernel."""
        kwargs = kwargs or {}
        if not self.values:
            return self._made(func, types, args, kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            number = fake_values.number(args[0])
            if number is not None:
                return number
        result = self._made(func, types, args, kwargs)
        with torch._C.DisableTorchFunction():
            fake_values.record(func, args, kwargs, result)
        return result

    def _made(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        way = _way(func)
        if way == "torch's":
            if self.masks_full and func in SELECTIONS:
                return self._selection(func, *args)
            return super().__torch_dispatch__(func, types, args, kwargs)
        with torch._C.DisableTorchFunction():  # modes of a step hear kernels of torch, not this
            key = self._key(func, args, kwargs)
            if key is not None and way == "view":
                return self._view(func, args, kwargs)
            cached = None if key is None else self._cached.get(key)
            if cached is not None:
                form, every = cached
                results = [self._result(one, args) for one in every]
                return results[0] if form is None else form(results)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if key is not None and key not in self._cached and len(self._cached) < MOST_CACHED:
            with torch._C.DisableTorchFunction():
                self._cached[key] = self._described(result, args, kwargs)
        return result

    def _key(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
        """Return all that a kernel's results depend on; None where no key has them."""
        key = [func, torch.get_default_dtype(), torch._C._get_default_device()]
        key.append(torch.is_inference_mode_enabled())
        if self._gather(args, key) and (not kwargs or self._gather(kwargs.items(), key)):
            return tuple(key)
        return None

    def _gather(self, values: Any, key: list[Any]) -> bool:
        """Add values to a key; return whether all of them can be in one."""
        for value in values:
            cls = type(value)
            if cls is FakeTensor:
                if (
                    value.fake_mode is not self
                    or value.constant is not None
                    or value.layout is not torch.strided
                    or value.is_conj()
                    or value.is_neg()
                ):
                    return False
                # Not where it begins: no result that is memory of its own depends on it, and each
                # step of time is a part of the same rows.
                key += (value.shape, value.stride(), value.dtype)
                key += (value.fake_device, value.requires_grad)
            elif cls in OTHERS:
                key += (cls, value)  # as 1, 1.0 and True are equal
            elif cls is list or cls is tuple:
                key += (cls, len(value))
                if not self._gather(value, key):
                    return False
            else:
                return False
        return True

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = args[0].fake_device
        with in_kernel_invocation_manager(self):
            found = func(*args, **kwargs)
        if isinstance(found, Tensor):
            return FakeTensor(self, found, device)
        return [FakeTensor(self, one, device) for one in found]

    def _selection(self, func: Any, values: Tensor, by: Any = None) -> Any:
        """Return the result of a kernel of `SELECTIONS` where every number of a mask is true."""
        if func is torch.ops.aten.masked_select.default:
            both = torch.broadcast_shapes(values.shape, by.shape)  # type: ignore[no-untyped-call]
            return values.new_empty(both.numel())
        if func is torch.ops.aten.nonzero.default:
            return values.new_empty((values.numel(), values.dim()), dtype=torch.int64)
        places = list[Tensor | None]()
        for index in by:
            mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            places += torch.ops.aten.nonzero(index).unbind(1) if mask else [index]
        return super().__torch_dispatch__(func, (), (values, places))

    def _result(self, cached: CachedResult, args: Any) -> Any:
        if cached is None:
            return None
        if isinstance(cached, int):
            return args[cached]
        shape, strides, dtype, device = cached
        with in_kernel_invocation_manager(self):
            empty = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return FakeTensor(self, empty, device)

    def _described(
        self, result: Any, args: Any, kwargs: Any
    ) -> tuple[type | None, list[CachedResult]] | None:
        """Return the form of results and each of them; None where they must be derived anew."""
        form = type(result) if type(result) in (tuple, list) else None
        every = tensors_in((args, kwargs))
        there = {storage_of(one) for one in every if type(one) is FakeTensor}
        found = list[CachedResult]()
        for one in [result] if form is None else result:
            place = next((i for i, argument in enumerate(args) if argument is one), None)
            if one is None or place is not None:
                found.append(place)
                continue
            if type(one) is not FakeTensor or one.constant is not None or one.requires_grad:
                return None
            if one.layout is not torch.strided or storage_of(one) in there or one.storage_offset():
                return None
            cached = one.shape, one.stride(), one.dtype, one.fake_device
            again = self._result(cached, args)
            alike = torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(one)
            if not alike or again.untyped_storage().nbytes() != one.untyped_storage().nbytes():
                return None
            there.add(storage_of(one))
            found.append(cached)
        return form, found


@cache
def _way(func: Any) -> str:
    """Return the way of a kernel: cached, a view, or torch's.

    It is cached where it returns memory of its own, or the argument that it writes to.
    """
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
        return "torch's"
    name, returns = str(func.name()), func._schema.returns  # type: ignore[no-untyped-call]
    if not returns or name.startswith(BY_NAME) or not TO_TORCH.isdisjoint(func.tags):
        return "torch's"
    if any(one.is_out for one in func._schema.arguments):
        return "torch's"
    if func.is_view or func is torch.ops.aten._unsafe_view.default:
        implicit = torch._C.DispatchKey.CompositeImplicitAutograd
        composed = torch._C._dispatch_has_kernel_for_dispatch_key(name, implicit)
        only = [str(one.type) for one in func._schema.arguments].count("Tensor") == 1
        first = func._schema.arguments[0].name == "self"
        return "view" if only and first and not composed else "torch's"
    aliases = [one.alias_info for one in returns if one.alias_info is not None]
    return "cached" if all(alias.is_write for alias in aliases) else "torch's"


# Paged parameters, as the forecast, the plan and the meter of a step count them.
#
# Inside `anybatch.offload_states` with a model, parameters and gradients share a number of bytes,
# however many they are. So a step is counted without them, and that limit is added to it.
#
#     parameters, gradients from when they are added     in the limit
#     a new gradient until it is added, and all else     counted
#
# Source: Hayakawa and Narihira, Out-of-core training, section 3: all variables are scheduled.

OWNER = "paged parameters"
"""Owner of the limit, in a ledger: parameters and gradients, and a part of an update's state."""

PAGES = "pages"
"""The attribute of a mode that prefetches parameters for kernels: where parameters are."""


@dataclass(frozen=True)
class Paged:
    """Every bounded memory that is in use in this thread.

    Attributes:
        every: the `ParameterPager` of `anybatch.offloading.parameters`: few, one for each model.
    """

    every: tuple[Any, ...]

    @property
    def limit(self) -> int:
        """Bytes that may be here."""
        return sum(pages.limit for pages in self.every)

    @property
    def here(self) -> int:
        """Bytes that are here now."""
        return sum(pages.resident for pages in self.every)

    @property
    def most(self) -> int:
        """No fewer bytes than were here at any time."""
        return sum(pages.most for pages in self.every)

    def holds(self, tensor: Tensor) -> bool:
        """Say whether a tensor is paged."""
        if not self.every or tensor.layout is not torch.strided:
            return False
        with torch._C.DisableTorchFunction():  # nobody asks for its address here
            key = key_of(tensor)
        return key is not None and any(key in pages.all for pages in self.every)

    @contextmanager
    def here_for(self, tensor: Tensor | None) -> Iterator[None]:
        """Have the memory of a tensor here at the beginning of the body, if it comes and goes.

        A read of its address there is no use of it, and does not make it resident.
        """
        if tensor is None or not self.holds(tensor):
            yield
            return
        with torch._C.DisableTorchFunction():
            key = key_of(tensor)
            assert key is not None
            for pages in self.every:
                pages.use([(key, False)], "a look at it")
            yield

    def ids(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """Return the ids of the tensors that are paged."""
        return frozenset(id(t) for t in tensors if self.holds(t)) if self.every else frozenset()


NOT_PAGED = Paged(())
"""Of a thread in which no mode is on."""


def paged() -> Paged:
    """Return the bounded memories in use in this thread now."""
    if not _len_torch_dispatch_stack():
        return NOT_PAGED
    found = (getattr(mode, PAGES, None) for mode in _get_current_dispatch_mode_stack())
    return Paged(tuple(pages for pages in found if pages is not None))


def large(tensor: Tensor) -> bool:
    """Return whether a tensor would be paged if it were a parameter: small ones are not."""
    if tensor.layout is not torch.strided:
        return False
    with torch._C.DisableTorchFunction():
        return bool(tensor.untyped_storage().nbytes() >= optimizers.SMALL)


@contextmanager
def uncounted(meter: Meter, leaves: Iterable[Tensor], ids: frozenset[int]) -> Iterator[None]:
    """Count a gradient in the body until it has been added, and then no more."""

    @service
    def added(leaf: Tensor) -> None:
        if leaf.grad is not None and large(leaf.grad):
            meter.exclude([leaf.grad])

    chosen: list[Any] = [leaf for leaf in leaves if id(leaf) in ids and leaf.requires_grad]
    handles = [leaf.register_post_accumulate_grad_hook(added) for leaf in chosen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
