"""torch's convolutions are taken over below autograd, autocast and compilers, and put back.

Every convolution of every module, of one to three directions and in any graph, ends in one of two
kernels of the dispatcher. They are replaced there while somebody wants it, so no model is changed.
Derivatives of any order come out right, because autograd records what it always does.

    F.conv1d, nn.Conv2d, ... ──autograd──> aten::convolution           ──> ours, or torch's own
                          its backward ──> aten::convolution_backward  ──> the same

What is transposed, empty, complex or unusual goes to torch's kernel, and so does every call made
while ours are at work.

Source: u-cuDNN, section III-D: a subset of the library's functions is overloaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library, get_kernel

from anybatch.conv.algorithms import LAYOUTS
from anybatch.conv.problem import Kernel, Problem

NAMES = ("aten::convolution", "aten::convolution_backward")

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

Strides = Callable[[], Sequence[int]]
"""Returns the strides that torch's own result has."""

Compute = Callable[[Problem, tuple[Tensor, Tensor], Tensor | None, Strides], Tensor | None]
"""Computes a kernel, and adds a bias where there is one; None leaves it to torch."""


class Kernels:
    """What stands in the place of torch's two kernels on one type of device.

    Args:
        device: "cpu" or "cuda".
        compute: computes a kernel, or leaves it.
    """

    def __init__(self, device: str, compute: Compute) -> None:
        self.key = device.upper()
        self._forward, self._backward = (get_kernel(name, self.key) for name in NAMES)
        self._compute, self._device = compute, device
        self._busy = threading.local()
        self._layouts: dict[Any, tuple[int, ...]] = {}

    def forward(self, keys: Any, *args: Any) -> Any:
        """Stand for aten::convolution."""
        x, w, bias, stride, padding, dilation, transposed, _, groups = args
        if not self._takes(x, w, transposed):
            return self._forward.call_boxed(keys, *args)
        place = stride, padding, dilation, groups
        found = self._ours("forward", x, w, place, (x, w), bias)
        return self._forward.call_boxed(keys, *args) if found is None else found

    def backward(self, keys: Any, *args: Any) -> Any:
        """Stand for aten::convolution_backward."""
        (
            dy,
            x,
            w,
            bias_sizes,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
            mask,
        ) = args
        if not self._takes(x, w, transposed):
            return self._backward.call_boxed(keys, *args)
        place = stride, padding, dilation, groups
        data = self._ours("data", x, w, place, (dy, w)) if mask[0] else None
        filters = self._ours("filter", x, w, place, (dy, x)) if mask[1] else None
        if data is None and filters is None:
            return self._backward.call_boxed(keys, *args)
        missing = [mask[0] and data is None, mask[1] and filters is None, False]
        dx, dw, db = data, filters, None
        if any(missing):
            more = (dy, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding)
            own = self._backward.call_boxed(keys, *more, groups, missing)
            dx, dw = own[0] if data is None else data, own[1] if filters is None else filters
        if mask[2]:  # torch's kernel would compute the gradient of the filters again for it
            db = dy.sum([0, *range(2, dy.dim())])
        return dx, dw, db

    def _takes(self, x: Tensor, w: Tensor, transposed: bool) -> bool:  # noqa: FBT001
        """Say whether a call is of a kind that may be ours."""
        return not (
            transposed
            or x.dim() != w.dim()
            or not 3 <= x.dim() <= 5
            or x.dtype != w.dtype
            or x.dtype not in DTYPES
            or not x.numel()
            or not w.numel()
            or getattr(self._busy, "now", False)
        )

    def _ours(
        self,
        kernel: Kernel,
        x: Tensor,
        w: Tensor,
        place: tuple[Sequence[int], Sequence[int], Sequence[int], int],
        operands: tuple[Tensor, Tensor],
        bias: Tensor | None = None,
    ) -> Tensor | None:
        """Return what a kernel computes where it is not left to torch."""
        dims = x.dim() - 2
        stride, padding, dilation, groups = place
        problem = Problem(
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
            self._device,
            layout_of(x),
        )
        self._busy.now = True
        try:
            return self._compute(problem, operands, bias, partial(self._strides, problem, x, w))
        finally:
            self._busy.now = False

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
    with FakeTensorMode():
        images, filters = (
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in (x, w)
        )
        y = aten.convolution.default(images, filters, None, *place, *last)
        if problem.kernel == "forward":
            return tuple(y.stride())
        mask = [problem.kernel == "data", problem.kernel == "filter", False]
        dx, dw, _ = aten.convolution_backward.default(y, images, filters, None, *place, *last, mask)
        return tuple((dx if mask[0] else dw).stride())


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


class _Installed:
    """torch's kernels are replaced while somebody is inside.

    The dispatcher must not change while another thread calls it, so it does only when the first one
    comes and when the last one has gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: list[tuple[str, Compute]] = []
        self._libraries: dict[str, tuple[Kernels, Library]] = {}

    def enter(self, entry: tuple[str, Compute]) -> None:
        with self._lock:
            device = entry[0]
            if device not in self._libraries:
                ours = Kernels(device, partial(self._computed, device))
                library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
                for name, fn in zip(NAMES, (ours.forward, ours.backward), strict=True):
                    library.impl(  # type: ignore[no-untyped-call]
                        name.removeprefix("aten::"),
                        fn,
                        ours.key,
                        with_keyset=True,
                        allow_override=True,
                    )
                self._libraries[device] = ours, library
            self._inside.append(entry)

    def leave(self, entry: tuple[str, Compute]) -> None:
        with self._lock:
            at = next(at for at, one in enumerate(self._inside) if one is entry)
            del self._inside[at]
            if not any(device == entry[0] for device, _ in self._inside):
                _, library = self._libraries.pop(entry[0])
                library._destroy()  # type: ignore[no-untyped-call]

    def _computed(self, device: str, *given: Any) -> Tensor | None:
        """Let the one who came last compute."""
        inside = [compute for kind, compute in list(self._inside) if kind == device]
        return inside[-1](*given) if inside else None


_INSTALLED = _Installed()


@contextmanager
def intercepted(device: str, compute: Compute) -> Iterator[None]:
    """Have convolutions of the whole process computed by `compute` in the body.

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
        _INSTALLED.leave(entry)
