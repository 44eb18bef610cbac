"""Replacement and restoration of torch's convolutions below autograd, autocast and compilers.

Every convolution of every module, of one to three directions and in any graph, ends in one of two
kernels of the dispatcher. They are replaced there while a context is entered, so no model is
changed. Derivatives of any order come out right, because autograd records the usual nodes.

    F.conv1d, nn.Conv2d, ... ──autograd──> aten::convolution           ──> ours, or torch's own
                          its backward ──> aten::convolution_backward  ──> the same

Unsupported calls (`anybatch.conv.calls`) use torch's kernel, and so does every call inside of ours.

Source: u-cuDNN, section III-D: a subset of the library's functions is overloaded.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library, get_kernel

from anybatch.conv.calls import BACKWARD, FORWARD, Place, problem_of, takes
from anybatch.conv.problem import Kernel, Problem
from anybatch.memory.fakes import interrupted_between_functions
from anybatch.memory.meter import within_kernel

NAMES = (FORWARD, BACKWARD)

Strides = Callable[[], Sequence[int]]
"""Returns the strides that torch's own result has."""

Compute = Callable[[Problem, tuple[Tensor, Tensor], Tensor | None, Strides], Tensor | None]
"""Computes a kernel, and adds a bias where there is one; None leaves it to torch."""


_BUSY = threading.local()
"""Whether ours are at work in this thread."""


_NOTHING: set[Any] = set()
"""Calls that a chooser without `left` leaves to torch for ever."""


@contextmanager
def untouched() -> Iterator[None]:
    """Have torch compute the convolutions of this thread in the body."""
    before, _BUSY.now = getattr(_BUSY, "now", False), True
    try:
        yield
    finally:
        _BUSY.now = before


class Kernels:
    """Replacements of torch's two convolution kernels on one type of device.

    Most calls of most networks are torch's for ever. The replacement may hold a set of these,
    `left`, and decide by `leaves(problem, size)` which belong to it; such a call costs a lookup.

    Args:
        device: "cpu" or "cuda".
        last: returns the current replacement, if any.
    """

    def __init__(self, device: str, last: Callable[[], Compute | None]) -> None:
        self.key = device.upper()
        self._forward, self._backward = (get_kernel(name, self.key) for name in NAMES)
        self._last, self._device = last, device
        self._layouts: dict[Any, tuple[int, ...]] = {}

    def forward(self, keys: Any, *args: Any) -> Any:
        """Stand for aten::convolution."""
        x, w, bias, stride, padding, dilation, transposed, _, groups = args
        compute = None if getattr(_BUSY, "now", False) else self._last()
        if compute is None:
            return self._forward.call_boxed(keys, *args)
        place = tuple(stride), tuple(padding), tuple(dilation), groups
        mark = x.shape, w.shape, x.stride(), x.dtype, place, transposed
        left: set[Any] = getattr(compute, "left", _NOTHING)
        if mark in left or not takes(x, w, transposed=transposed):
            return self._forward.call_boxed(keys, *args)
        found, forever = self._ours(compute, "forward", x, w, place, (x, w), bias)
        if forever:
            left.add(mark)
        return self._forward.call_boxed(keys, *args) if found is None else found

    def backward(self, keys: Any, *args: Any) -> Any:
        """Stand for aten::convolution_backward."""
        dy, x, w, _, stride, padding, dilation, transposed, _, groups, mask = args
        compute = None if getattr(_BUSY, "now", False) else self._last()
        if compute is None:
            return self._backward.call_boxed(keys, *args)
        place = tuple(stride), tuple(padding), tuple(dilation), groups
        mark = x.shape, w.shape, x.stride(), x.dtype, place, transposed, tuple(mask)
        left: set[Any] = getattr(compute, "left", _NOTHING)
        if mark in left or not takes(x, w, transposed=transposed):
            return self._backward.call_boxed(keys, *args)
        data, forever, filters, ever = None, True, None, True
        if mask[0]:
            data, forever = self._ours(compute, "data", x, w, place, (dy, w))
        if mask[1]:
            with within_kernel(x.device, 0 if data is None else data.nbytes):
                filters, ever = self._ours(compute, "filter", x, w, place, (dy, x))
        if forever and ever:
            left.add(mark)
        if data is None and filters is None:
            return self._backward.call_boxed(keys, *args)
        return self._joined(keys, args, data, filters)

    def _joined(
        self, keys: Any, args: Sequence[Any], data: Tensor | None, filters: Tensor | None
    ) -> tuple[Any, Any, Any]:
        """Return three gradients; torch computes the missing ones."""
        dy, mask = args[0], args[-1]
        missing = [mask[0] and data is None, mask[1] and filters is None, False]
        dx, dw, db = data, filters, None
        if any(missing):
            own = self._backward.call_boxed(keys, *args[:-1], missing)
            dx, dw = own[0] if data is None else data, own[1] if filters is None else filters
        if mask[2]:  # torch's kernel would compute the gradient of the filters again for it
            db = dy.sum([0, *range(2, dy.dim())])
        return dx, dw, db

    def _ours(
        self,
        compute: Compute,
        kernel: Kernel,
        x: Tensor,
        w: Tensor,
        place: Place,
        operands: tuple[Tensor, Tensor],
        bias: Tensor | None = None,
    ) -> tuple[Tensor | None, bool]:
        """Return the result of a kernel, None for torch's, and whether it is always torch's."""
        problem = problem_of(kernel, x, w, place, self._device)
        with untouched():
            found = compute(problem, operands, bias, partial(self._strides, problem, x, w))
        leaves = getattr(compute, "leaves", None)
        return found, found is None and leaves is not None and leaves((problem, len(x)))

    def _strides(self, problem: Problem, x: Tensor, w: Tensor) -> tuple[int, ...]:
        """Return the strides of torch's own result: those of all three tensors decide."""
        key = problem, len(x), x.stride(), w.stride()
        if key not in self._layouts:
            self._layouts[key] = _strides(problem, x, w)
        return self._layouts[key]


def _strides(problem: Problem, x: Tensor, w: Tensor) -> tuple[int, ...]:
    """Let torch's kernels run on tensors without data."""
    place = (problem.stride, problem.padding, problem.dilation, False)
    last = [0] * len(problem.image), problem.groups
    aten = torch.ops.aten
    with interrupted_between_functions(), FakeTensorMode():
        images, filters = (
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in (x, w)
        )
        y = aten.convolution.default(images, filters, None, *place, *last)
        if problem.kernel == "forward":
            return tuple(y.stride())
        mask = [problem.kernel == "data", problem.kernel == "filter", False]
        dx, dw, _ = aten.convolution_backward.default(y, images, filters, None, *place, *last, mask)
        return tuple((dx if mask[0] else dw).stride())


class _Installed:
    """Replacement of torch's kernels while any context is active.

    The dispatcher must not change while another thread calls it, so it changes only when the first
    context is entered and when the last one has exited; engines leave it changed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._staying: set[str] = set()
        self._inside: tuple[tuple[str, Compute], ...] = ()
        self._libraries: dict[str, tuple[Kernels, Library]] = {}

    def enter(self, entry: tuple[str, Compute]) -> None:
        with self._lock:
            self._install(entry[0])
            self._inside = (*self._inside, entry)

    def retain(self, device: str) -> None:
        with self._lock:
            self._install(device)
            self._staying.add(device)

    def _install(self, device: str) -> None:
        if device in self._libraries:
            return
        ours = Kernels(device, partial(self.last, device))
        library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            with warnings.catch_warnings():
                # torch warns where a kernel of this device is replaced, which is intended
                # (test_a_warning_while_a_kernel_is_replaced_is_no_error).
                warnings.simplefilter("ignore")
                for name, fn in zip(NAMES, (ours.forward, ours.backward), strict=True):
                    library.impl(  # type: ignore[no-untyped-call]
                        name.removeprefix("aten::"),
                        fn,
                        ours.key,
                        with_keyset=True,
                        allow_override=True,
                    )
        except BaseException:
            library._destroy()  # type: ignore[no-untyped-call]
            raise
        self._libraries[device] = ours, library

    def exit(self, entry: tuple[str, Compute]) -> None:
        with self._lock:
            at = next(at for at, one in enumerate(self._inside) if one is entry)
            self._inside = (*self._inside[:at], *self._inside[at + 1 :])
            there = self._staying | {device for device, _ in self._inside}
            if entry[0] not in there:
                _, library = self._libraries.pop(entry[0])
                library._destroy()  # type: ignore[no-untyped-call]

    def last(self, device: str) -> Compute | None:
        for entered, compute in reversed(self._inside):
            if entered == device:
                return compute
        return None


_INSTALLED = _Installed()


@contextmanager
def intercepted(device: str, compute: Compute) -> Iterator[None]:
    """Compute the convolutions of the process, in all threads, by `compute` in the body.

    Of several that are active at a time, in one thread or in more, the one entered last computes;
    when all have been left, torch's own kernels are back. No thread may compute a convolution
    outside while the first one is entered or the last one left.

    Args:
        device: "cpu" or "cuda".
        compute: computes a kernel, or leaves it to torch.
    """
    entry = device, compute
    _INSTALLED.enter(entry)
    try:
        yield
    finally:
        _INSTALLED.exit(entry)


def inside(device: str) -> Compute | None:
    """Return the active `Compute` of a device; None where torch computes convolutions."""
    return _INSTALLED.last(device)


def retain(device: str) -> None:
    """Let torch's kernels remain replaced, so that frequent entries do not change the dispatcher.

    Outside of any context, a convolution then calls torch's kernel through ours.
    """
    _INSTALLED.retain(device)
