"""Live bytes of tensors, counted as they are born and freed, on any device, real or fake.

``torch.cuda.max_memory_allocated`` exists only for CUDA, returns one number, and needs the memory.
A dispatch mode intercepts every tensor that a kernel returns; a weak reference on its storage shows
when the memory is free again. The same mode counts a step on fake tensors, without memory.

    kernel t returns a storage  ──>  live from t on
    the storage is freed        ──>  until the next kernel

Allocations inside a kernel are not counted, unless it reports them (`within_kernel`). Existing
storages are counted if named (`Meter(existing=...)`), and otherwise belong to the caller.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anybatch.core import accelerator
from anybatch.core.modules import DispatchMode, local, parts_of_sparse
from anybatch.core.optimizers import rounding
from anybatch.core.status import STATUS
from anybatch.memory.ledger import Timeline, record

STEP = "activations"
"""The owner of allocations of a step without another owner."""

FOREIGN = ""
"""The owner of storages that were there before and are not counted."""

FROM_OUTSIDE = "aten.lift_fresh.default"
"""The kernel through which ``torch.tensor(...)`` brings in memory it has just made."""

DEVICE = torch.ops.prim.device.default
"""Asks a fake where it is, which torch does more often than all else; nothing is computed."""


class Meter(DispatchMode):
    """Count live bytes on one device inside ``with meter:``.

    Made under a fake mode it counts fakes too; elsewhere they hold nothing.

    Args:
        device: only tensors on this type of device count.
        existing: owner -> tensors that are there already and count.
        spare: bytes for real tensors where a kernel on fakes shows too little. Default 0: those
            of a step of one row.
        limit: the most live bytes. Default None: any.
        stops: called where there are more; whether to raise then. Default: always.

    Attributes:
        live: bytes live now, each storage rounded up as the device's allocator does it.
        peak: the most bytes live after any kernel.

    Example:
        >>> with Meter(torch.device("cpu"), {"parameters": model.parameters()}) as meter:
        ...     loss_fn(model(x), y).backward()
        >>> meter.peak

    Raises:
        torch.OutOfMemoryError: a kernel has returned more than the limit leaves.
    """

    def __init__(
        self,
        device: torch.device,
        existing: Mapping[str, Iterable[Tensor]] | None = None,
        *,
        spare: int = 0,
        limit: int | None = None,
        stops: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._limit, self._stops = sys.maxsize if limit is None else limit, stops
        self._device, self._spare, self._grain = device.type, spare, rounding(device)
        flag = f"is_{device.type}"  # read in a fifth of the time of a device
        self._flag = flag if hasattr(Tensor, flag) else ""
        self._events: list[str] = []
        self._inside = False
        modes = _get_current_dispatch_mode_stack()
        self._fakes = any(isinstance(mode, FakeTensorMode) for mode in modes)
        self._open: dict[int, _Span] = {}
        self._spans: list[_Span] = []
        for owner, tensors in (existing or {}).items():
            for tensor in tensors:
                self._see(tensor, owner)
        self.peak = self.live

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        # A meter lives as long as a tensor that it counts, and the step ends
        # (test_no_step_lives_until_garbage_is_collected).
        self._stops = lambda: True

    @property
    def events(self) -> int:
        """Kernels counted so far."""
        return len(self._events)

    def held_by(self, owner: str) -> int:
        """Return the live bytes of an owner."""
        return sum(span.size for span in self._open.values() if span.owner == owner)

    def claim(self, owner: str, tensors: Iterable[Tensor]) -> None:
        """Set the owner of the storages of live tensors, from their allocation on."""
        for tensor in tensors:
            for storage in self._storages(tensor):
                span = self._open.get(storage._cdata)
                if span is not None and span.owner == STEP:
                    span.owner = owner

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Count live tensors no more: something else does."""
        for tensor in tensors:
            for storage in self._storages(tensor):
                self._end(storage._cdata)
                self._begin(storage, FOREIGN, 0, storage.nbytes())

    def take_in(self, tensor: Tensor) -> None:
        """Count a tensor that was made where the meter intercepts no kernel."""
        self._see(tensor, STEP)
        if self.live > self.peak:
            self._rise()

    def resized(self, storage: Any) -> None:
        """Record that a storage has freed its memory, or has it again."""
        self._end(storage._cdata)
        if storage.nbytes():
            self._begin(storage, STEP, storage.nbytes(), storage.nbytes())
            self.peak = max(self.peak, self.live)

    def more(self, device: torch.device, count: int) -> None:
        """Count more bytes on a device, or fewer, that belong to no observed tensor."""
        if device.type == self._device:
            self.live += self._rounded(count) if count > 0 else -self._rounded(-count)
            self.peak = max(self.peak, self.live)

    def timeline(self) -> Timeline:
        """Return the counted bytes, by owner."""
        owners = tuple(dict.fromkeys(span.owner for span in self._spans))
        now = len(self._events)
        spans = [(s.owner, s.size, s.first, now if s.end is None else s.end) for s in self._spans]
        return record(spans, self._events, owners, grain=self._grain)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False to omit the guard against compilation: its body runs eagerly."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one kernel, and count its results."""
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # what the fake mode below would return, without a call of it
        if self._inside or func is DEVICE:  # a kernel made of kernels, or none
            return func(*args, **(kwargs or {}))
        STATUS.tick()
        name = kernel_name(func)
        if name != FROM_OUTSIDE:
            with torch._C.DisableTorchFunction():  # nobody asks for an address here
                self._see_all(args)
                if kwargs:
                    self._see_all(kwargs.values())
        self._inside = True
        running = _RUNNING.meters
        running.append(self)
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
            if self._fakes:
                result = completed(name, args, result, self._spare)
        finally:
            running.pop()
            self._inside = False
        with torch._C.DisableTorchFunction():
            here = self._see_results(result, name, args)
        if here:  # else it is about shapes alone, as on the meta device
            self._events.append(name)
        if self.live > self.peak:
            self._rise()
        return result

    def _see_all(self, values: Iterable[Any]) -> None:
        """Take in the tensors among the arguments of a kernel, which were there before."""
        for value in values:
            if isinstance(value, Tensor):
                if not self._knows(value):
                    self._see(value, FOREIGN)
            elif isinstance(value, list | tuple | dict):
                for tensor in tensors_in(value):
                    self._see(tensor, FOREIGN)

    def _knows(self, tensor: Tensor) -> bool:
        """Say whether a tensor of a common type lies in a storage that is counted, or foreign."""
        if type(tensor) not in DENSE or tensor.layout is not torch.strided:
            return False
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # within torch.func
            return False
        span = self._open.get(storage._cdata)
        return span is not None and (span.owner == FOREIGN or span.reported == storage.nbytes())

    def _see_results(self, result: Any, name: str, args: tuple[Any, ...]) -> bool:
        """Count the results of a kernel; return whether some of them are on the device."""
        if type(result) is Tensor:
            return self._see(result, STEP)
        here = False
        for tensor in tensors_in(result):
            least = terms(name, args) if isinstance(tensor, FakeTensor) else 0
            here |= self._see(tensor, STEP, least)
        return here

    def _rise(self) -> None:
        """Take the live bytes for the peak, and compare them with the limit."""
        self.peak = self.live
        if self.peak > self._limit and self._stops():
            raise torch.OutOfMemoryError(
                f"out of memory: a step holds {self.live} bytes, and its budget is {self._limit}"
            )

    def _see(self, tensor: Tensor, owner: str, least: int = 0) -> bool:
        """Take in the storages of a tensor; return whether it is on the device."""
        if not self._counts(tensor):
            return False
        for storage in storages(tensor):
            span = self._open.get(storage._cdata)
            size = 0 if span is not None and span.owner == FOREIGN else storage.nbytes()
            if span is not None and (span.owner == FOREIGN or span.reported == size):
                continue
            if span is not None:  # resized in place
                self._end(storage._cdata)
            self._begin(storage, owner, 0 if owner == FOREIGN else max(size, least), size)
        return True

    def _begin(self, storage: Any, owner: str, size: int, reported: int) -> None:
        key = storage._cdata
        span = self._open[key] = _Span(owner, size, len(self._events), reported)
        span.watch = weakref.ref(storage, partial(self._end, key))
        if size:
            self.live += self._rounded(size)
            self._spans.append(span)

    def _counts(self, tensor: Tensor) -> bool:
        if type(tensor) is FakeTensor:
            return self._fakes and tensor.fake_device.type == self._device
        if self._flag:
            return bool(getattr(tensor, self._flag))
        return tensor.device.type == self._device

    def _storages(self, tensor: Tensor) -> tuple[Any, ...]:
        return storages(tensor) if self._counts(tensor) else ()

    def _end(self, key: int, _watch: Any = None) -> None:
        span = self._open.pop(key, None)
        if span is not None:
            span.end, span.watch = len(self._events), None
            self.live -= self._rounded(span.size)

    def _rounded(self, size: int) -> int:
        return -(-size // self._grain) * self._grain


_NAMES: dict[int, tuple[Any, str]] = {}
"""Kernels by their ids, and their names: torch puts one together each time it is requested."""


def kernel_name(func: Any) -> str:
    """Return the name of a kernel, with its overload."""
    found = _NAMES.get(id(func))
    if found is not None:
        return found[1]
    name = str(func)
    if isinstance(func, OpOverload):  # which torch makes once
        _NAMES[id(func)] = func, name
    return name


class _Span:
    """One storage: its owner, size, reported size, and the events after which it is live."""

    __slots__ = ("end", "first", "owner", "reported", "size", "watch")

    def __init__(self, owner: str, size: int, first: int, reported: int) -> None:
        self.owner, self.size, self.first, self.reported = owner, size, first, reported
        self.end: int | None = None
        self.watch: Any = None


class _Running(threading.local):
    """Meters with a running kernel, thread by thread."""

    def __init__(self) -> None:
        self.meters: list[Meter] = []


_RUNNING = _Running()


@contextmanager
def within_kernel(device: torch.device, count: int) -> Iterator[None]:
    """Have the meters that count a kernel of this thread count more while its body runs."""
    meters = list(_RUNNING.meters)
    for meter in meters:
        meter.more(device, count)
    try:
        yield
    finally:
        for meter in meters:
            meter.more(device, -count)


def take_in(tensor: Tensor) -> None:
    """Have the meters around count a tensor that was made where no mode intercepts kernels."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Meter):
            mode.take_in(tensor)


DENSE = frozenset((Tensor, nn.Parameter, FakeTensor))
"""Types of tensors that are on one rank and have memory, as almost all have."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the arguments or results of a kernel."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, Tensor):
                yield item
            elif isinstance(item, list | tuple | dict):
                yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def written_by(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that a kernel writes to."""
    for at, name in written_arguments(func):
        yield from tensors_in(args[at] if at < len(args) else kwargs.get(name))


@cache  # torch makes a schema's parts anew each time
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the arguments that a kernel writes to: their places, and their names."""
    every = enumerate(func._schema.arguments if func._schema.is_mutable else ())
    aliases = ((at, one.name, one.alias_info) for at, one in every)
    return tuple((at, name) for at, name, alias in aliases if alias and alias.is_write)


def storages(tensor: Tensor) -> tuple[Any, ...]:
    """Return the storages that hold a tensor's data; a sparse tensor has several."""
    if type(tensor) not in DENSE:
        tensor = local(tensor)
        if is_lazy(tensor):
            return ()
    if tensor.layout is torch.strided:
        try:
            with torch._C.DisableTorchFunction():  # nobody asks for its address here
                return (tensor.untyped_storage(),)
        except (RuntimeError, NotImplementedError):  # a subclass that only wraps others
            return ()
    if isinstance(tensor, FakeTensor):
        raise NotImplementedError("fakes do not tell how many entries a sparse tensor has")
    return tuple(part.untyped_storage() for part in parts_of_sparse(tensor))


# Memory of a kernel's results that a dry run does not show.
#
# A kernel on fakes returns the shapes that torch's formulas for them name, and some of these differ
# from those of the real kernel. Three cases are known:
#
#     a mean     its scalar lies in the memory of all its terms
#     an LSTM    what its forward keeps for backward is foreseen as empty, and its backward returns
#                the gradients of two biases, foreseen as one
#     BatchNorm  a gradient of its input that nobody has requested is foreseen, and not made
#
# The memory that an LSTM saves is undocumented: some buffers, each of so many bytes a row and
# rounded up to a page. So a few rows of zeros are run once, and r rows are bounded by
#
#     bytes(r) <= r * bytes(R) / R + pages
#
# as every buffer of R rows holds at least R times the bytes of a row. That run takes memory: a step
# of one row has as much as R = 1 needs, and more rows are run if a budget permits, in powers of
# two, so that a larger budget never yields a larger bound. Anything else is found by the small real
# step that each forecast is compared with (`anybatch.planner.ladder`).
#
# Source: oneDNN's guide to its RNN primitive, "Workspace".

FULL = (
    "aten.mse_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.binary_cross_entropy.default",
    "aten.soft_margin_loss.default",
)
"""Kernels whose mean is a scalar in the memory of all its terms; a fake one has only the scalar."""

RECURRENT = "aten.mkldnn_rnn_layer.default"
"""The kernel of one layer and direction of an LSTM on a CPU; its last result is for backward."""

BACKWARD = "aten.mkldnn_rnn_layer_backward.default"
"""Its backward."""

NORMALISED = "aten.native_batch_norm_backward.default"
"""The backward of BatchNorm; its last argument selects the results."""

BIASES = 3, 4
"""Which of its results are the gradients of the two biases."""

OF_ROWS = (0, 5, 6)
"""Its arguments that have rows, [..., rows, features]."""

MOST = 8
"""Rows that are run at most, a power of two: the rounding is an eighth of it for each."""

PAGES = 8 * 4096
"""Bytes that all its buffers are rounded up by, at most."""


def terms(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes of the terms that a real kernel's mean is a part of; 0 for most kernels."""
    if name not in FULL:
        return 0
    return int(max(args[0].numel(), args[1].numel()) * args[0].element_size())


def completed(name: str, args: tuple[Any, ...], result: Any, spare: int) -> Any:
    """Return a fake kernel's results as large as the real ones are.

    Args:
        name: of the kernel.
        args: that it was given.
        result: its return value.
        spare: bytes within which some rows of zeros may be run.
    """
    if name == RECURRENT and torch.is_grad_enabled():  # without, it keeps nothing
        return _with_workspace(args, result, spare)
    if name == BACKWARD:
        return _with_both_biases(result)
    if name == NORMALISED and not args[-1][0]:
        return None, *result[1:]
    return result


def _with_both_biases(result: Any) -> Any:
    """Return the results of a backward with a gradient for each of the two biases."""
    one, other = (result[index] for index in BIASES)
    if not isinstance(one, FakeTensor) or one is not other:
        return result
    return (*result[: BIASES[1]], torch.empty_like(other), *result[BIASES[1] + 1 :])


def _with_workspace(args: tuple[Any, ...], result: Any, spare: int) -> Any:
    """Return the results of a forward with the buffer that it saves for backward."""
    saved = result[-1]
    if not isinstance(saved, FakeTensor) or saved.numel():
        return result
    rows = int(args[0].shape[-2])
    a_row = _saved_per_row(tuple(map(_described, range(len(args)), args)), spare)
    return (*result[:-1], saved.new_empty(rows * a_row + PAGES))


@dataclass(frozen=True)
class _Sizes:
    """Description of a tensor: its sizes, without its rows, and its dtype."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    dtype: torch.dtype
    has_rows: bool

    def zeros(self, rows: int) -> Tensor:
        """Return such a tensor; weights have the memory of one number."""
        if self.has_rows:
            shape = *self.before, rows, *self.after
            return torch.zeros(shape, dtype=self.dtype, device="cpu")
        return torch.zeros((), dtype=self.dtype, device="cpu").expand(self.before)

    @property
    def bytes(self) -> int:
        """Return the bytes of its elements, or of those of a row."""
        return prod((*self.before, *self.after)) * self.dtype.itemsize


def _described(index: int, value: Any) -> Any:
    """Return an argument, with its description in place of a tensor."""
    if not isinstance(value, Tensor):
        return tuple(value) if isinstance(value, list) else value
    shape = tuple(map(int, value.shape))
    if index in OF_ROWS:
        return _Sizes(shape[:-2], shape[-1:], value.dtype, has_rows=True)
    return _Sizes(shape, (), value.dtype, has_rows=False)


def _saved_per_row(args: tuple[Any, ...], spare: int) -> int:
    """Return the bytes that a layer keeps for each row, but for some pages: it is run."""
    every, _ = _run(args, 1)
    affordable = min(MOST, max(1, spare // every))
    rows = 1 << (affordable.bit_length() - 1)
    return -(-_run(args, rows)[1] // rows)


@cache
def _run(args: tuple[Any, ...], rows: int) -> tuple[int, int]:
    """Return the bytes that a layer of zeros takes, with its rows, and those that it keeps."""
    with unset_fake_temporarily(), torch.enable_grad():
        arguments = [arg.zeros(rows) if isinstance(arg, _Sizes) else arg for arg in args]
        made = torch.ops.aten.mkldnn_rnn_layer.default(*arguments)
        there = [*(arguments[index] for index in OF_ROWS), *made]
        return sum(t.untyped_storage().nbytes() for t in there), int(made[-1].numel())


# The most bytes that a body holds, as the device or the meter counts them.

Peak = Callable[[], int | None]
"""Returns the most bytes that were held; None if unknown."""


def read_peak(device: torch.device, *, anew: bool = False) -> Peak:
    """Return a function that reads the most bytes that a device's allocator hands out from now on.

    Its statistic is the user's, too, and cannot be restored after a reset. It shows this peak if it
    grows from now on, or if it was no more than the allocated bytes now.

    Args:
        device: without such a statistic, the peak is unknown.
        anew: reset the statistic if it would not show the peak. Default False.

    Returns:
        A function that returns the bytes; None if unknown.
    """
    counts = accelerator.of(device)
    if not counts.peaks:
        return lambda: None
    before = counts.peak(device)
    recorded = before == counts.allocated(device)
    if anew and not recorded:
        counts.reset_peak(device)
        recorded = True

    def peak() -> int | None:
        found = counts.peak(device)
        return found if recorded or found > before else None

    return peak


@contextmanager
def live_peak(
    device: torch.device, existing: Mapping[str, Iterable[Tensor]]
) -> Iterator[Callable[[], int]]:
    """Count the most bytes of tensors that are live on a device in the body.

    Args:
        device: its allocator counts where it reports a peak; elsewhere every kernel is intercepted.
        existing: owner -> tensors that are live before and count.

    Yields:
        A function that returns the bytes so far; it may be called after the body.
    """
    if accelerator.of(device).peaks:
        peak = read_peak(device, anew=True)
        yield lambda: peak() or 0
        return
    with Meter(device, existing) as meter:
        yield lambda: int(meter.peak)
