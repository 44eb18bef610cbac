"""Override of torch's convolutions below autograd, and a recorder of the kernels it calls.

Every convolution of every module, of one to three directions and in any graph, ends in one of two
kernels of the dispatcher. They are replaced there while a context is entered, so no model is
changed. Derivatives of any order come out right, because autograd records the usual nodes.

    F.conv1d, nn.Conv2d, ... ──autograd──> aten::convolution           ──> ours, or torch's own
                          its backward ──> aten::convolution_backward  ──> the same

Unsupported calls use torch's kernel, and so does every call inside of ours.

Source: u-cuDNN, section III-D: a subset of the library's functions is overloaded.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library, get_kernel

from anybatch.conv.algorithms import LAYOUTS
from anybatch.conv.divide import Key
from anybatch.conv.problem import Kernel, Problem
from anybatch.core.modules import DispatchMode
from anybatch.core.pytree import tensors
from anybatch.memory.fakes import interrupted_between_functions
from anybatch.memory.meter import within_kernel

# Kernels and samples of a call of torch's convolutions.
#
#     aten::convolution            forward
#     aten::convolution_backward   data, filter, or both, as its mask says
#
# Transposed, empty, complex and unusual calls are left to torch.

FORWARD, BACKWARD = "aten::convolution", "aten::convolution_backward"

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

Place = tuple[Sequence[int], Sequence[int], Sequence[int], int]
"""Stride, padding and dilation as torch has them, and groups."""


def takes(
    x: Tensor, w: Tensor, place: Place, bias: Tensor | None = None, *, transposed: bool
) -> bool:
    """Return whether a call of a convolution is one that this library may compute.

    What is none at all, such as one with stride 0, is torch's to refuse.
    """
    stride, padding, dilation, groups = place
    if min(*stride, *dilation, groups) < 1 or min(padding) < 0:
        return False
    if bias is not None and (bias.shape != w.shape[:1] or bias.dtype != x.dtype):
        return False
    return not (
        transposed
        or x.dim() != w.dim()
        or not 3 <= x.dim() <= 5
        or x.dtype != w.dtype
        or x.dtype not in DTYPES
        or not x.numel()
        or not w.numel()
        or x.shape[1] != w.shape[1] * groups
        or w.shape[0] % groups
    )


def problem_of(kernel: Kernel, x: Tensor, w: Tensor, place: Place, device: str) -> Problem:
    """Return a kernel of a layer."""
    dims = x.dim() - 2
    stride, padding, dilation, groups = place
    return Problem(
        kernel,
        x.shape[1],
        w.shape[0],
        tuple(x.shape[2:]),
        tuple(w.shape[2:]),
        _several(stride, dims),
        _several(padding, dims),
        _several(dilation, dims),
        groups,
        DTYPES[x.dtype],
        device,
        layout_of(x),
    )


def kernels_of(name: str, args: Sequence[Any]) -> list[Key]:
    """Return the kernels that a call asks for, on tensors with data or without.

    Args:
        name: of the operator, such as "aten::convolution".
        args: as the dispatcher has them.
    """
    if name == FORWARD:
        x, w, _, stride, padding, dilation, transposed, _, groups = args
        wanted: list[Kernel] = ["forward"]
    elif name == BACKWARD:
        _, x, w, _, stride, padding, dilation, transposed, _, groups, mask = args
        both: list[tuple[Kernel, bool]] = [("data", mask[0]), ("filter", mask[1])]
        wanted = [kernel for kernel, requested in both if requested]
    else:
        return []
    place = stride, padding, dilation, groups
    if not takes(x, w, place, transposed=transposed):
        return []
    return [(problem_of(kernel, x, w, place, x.device.type), len(x)) for kernel in wanted]


def layout_of(x: Tensor) -> str:
    """Return "channels_last" for a tensor that is so and not contiguous, else "contiguous"."""
    last = x.dim() in LAYOUTS and not x.is_contiguous()
    return (
        "channels_last"
        if last and x.is_contiguous(memory_format=LAYOUTS[x.dim()])
        else "contiguous"
    )


def _several(values: Sequence[int], dims: int) -> tuple[int, ...]:
    return tuple(values) if len(values) == dims else tuple(values) * dims


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
        shaped = None if bias is None else (bias.shape, bias.dtype)
        mark = x.shape, w.shape, x.stride(), x.dtype, place, transposed, shaped
        left: set[Any] = getattr(compute, "left", _NOTHING)
        if mark in left or not takes(x, w, place, bias, transposed=transposed):
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
        if mark in left or not takes(x, w, place, transposed=transposed):
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
        self.entered: tuple[tuple[str, Compute], ...] = ()
        self._libraries: dict[str, tuple[Kernels, Library]] = {}

    def enter(self, entry: tuple[str, Compute]) -> None:
        with self._lock:
            self._install(entry[0])
            self.entered = (*self.entered, entry)

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
            at = next(at for at, one in enumerate(self.entered) if one is entry)
            self.entered = (*self.entered[:at], *self.entered[at + 1 :])
            there = self._staying | {device for device, _ in self.entered}
            if entry[0] not in there:
                _, library = self._libraries.pop(entry[0])
                library._destroy()  # type: ignore[no-untyped-call]

    def last(self, device: str) -> Compute | None:
        for entered, compute in reversed(self.entered):
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
    return _INSTALLED.last(device) if _INSTALLED.entered else None


def retain(device: str) -> None:
    """Let torch's kernels remain replaced, so that frequent entries do not change the dispatcher.

    Outside of any context, a convolution then calls torch's kernel through ours.
    """
    _INSTALLED.retain(device)


# Recorder of the convolution kernels that a step calls, and of their layers.
#
# A model need not say which convolutions it has. It is run on tensors without data, in the sizes
# that a step will have, and every call is noted: no memory, no time, and the strides are those that
# the real ones will have.
#
#     aten::convolution(x [8, 3, 32, 32], w [16, 3, 5, 5]) ──> forward 3x32x32, 8 samples

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

ROWS = 2
"""Samples with which a model's kernels are recorded: one may be laid out in another way."""


class KernelRecorder(DispatchMode):
    """Dispatch mode that records the convolution kernels called inside it.

    Args:
        model: its layers are noted by their names, too. Default None.
        samples: of the batch that is run inside. Default 1.

    Attributes:
        keys: kernels and their samples, how often each was called.
    """

    def __init__(self, model: nn.Module | None = None, samples: int = 1) -> None:
        super().__init__()
        self.keys: dict[Key, int] = {}
        self._layers: dict[Problem, dict[str, None]] = {}
        self._model, self._samples, self._now = model, samples, ""
        self._hooks: list[Any] = []

    def scaled(self, samples: int) -> list[Key]:
        """Return the recorded kernels as a batch of another size calls them.

        Args:
            samples: of that batch.
        """
        return [(problem, max(1, n * samples // self._samples)) for problem, n in self.keys]

    def layers(self, problem: Problem) -> list[str]:
        """Return the names of the layers that have a kernel.

        Args:
            problem: the kernel.
        """
        return list(self._layers.get(_layer(problem), ()))

    def __enter__(self) -> KernelRecorder:
        """Begin to record."""
        for name, module in () if self._model is None else self._model.named_modules():
            if isinstance(module, CONVOLUTIONS):
                self._hooks.append(module.register_forward_pre_hook(self._entered(name)))
                self._hooks.append(module.register_forward_hook(self._left, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End the recording."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a kernel, and run it."""
        for key in kernels_of(func._schema.name, args):
            self.keys[key] = self.keys.get(key, 0) + 1
            if self._now:
                self._layers.setdefault(_layer(key[0]), {})[self._now] = None
        return func(*args, **(kwargs or {}))

    def _entered(self, name: str) -> Any:
        def entered(_module: nn.Module, _args: Any) -> None:
            self._now = name

        return entered

    def _left(self, _module: nn.Module, _args: Any, _result: Any) -> None:
        self._now = ""


def _layer(problem: Problem) -> Problem:
    """Return the common description of all three kernels of a layer."""
    return replace(problem, kernel="forward")


def record_kernels(model: nn.Module, inputs: Tensor) -> KernelRecorder:
    """Record the kernels of a forward and a backward on a few samples; restore all state.

    Args:
        model: in the mode in which it is trained.
        inputs: [N, ...], of which the first two samples are taken, to the model's device.

    Returns:
        The record; its ``scaled`` has the kernels of a larger batch.
    """
    x = inputs[:ROWS].to(next(model.parameters()).device)
    buffers = [buffer.clone() for buffer in model.buffers()]
    gradients = [p.grad for p in model.parameters()]
    with torch.random.fork_rng(), KernelRecorder(model, len(x)) as recorder:
        torch.stack([t.sum() for _, t in tensors(model(x))]).sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return recorder


def sizes_of(size: int, micro_batch: int) -> list[int]:
    """Return the sizes that the micro-batches of a batch have: all but the last, and the last.

    Example:
        >>> sizes_of(100, 32)
        [32, 4]
    """
    n = min(size, micro_batch)
    return [n] if size % n == 0 else [n, size % n]
