"""Convolutions of every kind, and what their kernels compute in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from anybatch.conv.algorithms import Plain, native
from anybatch.conv.circles import Circle, options
from anybatch.conv.divide import front
from anybatch.conv.fourier import Fourier
from anybatch.conv.measure import Costs
from anybatch.conv.problem import KERNELS, Problem
from anybatch.reports import Configuration, KernelPart

KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "strided": {"stride": 2},
    "padded": {"padding": 2},
    "dilated": {"dilation": 2, "padding": 1},
    "grouped": {"groups": 2},
    "depthwise": {"groups": 4, "channels": 4, "filters": 4, "padding": 1},
    "multiplied": {"groups": 4, "channels": 4, "filters": 8, "stride": 3, "padding": 2},
    "all": {"stride": 2, "padding": 3, "dilation": 2, "groups": 2},
}
"""What is special -> how a problem has it, in all directions alike."""


def problem(kernel: str, dims: int, variant: str) -> Problem:
    """A small problem; its sizes differ between the directions."""
    options = {"channels": 4, "filters": 6, "groups": 1, **KINDS[variant]}
    window = (3, 5, 2)[:dims] if dims > 1 else (5,)
    image = (13, 11, 9)[:dims]
    alike = {
        name: (int(str(options.pop(name, plain))),) * dims
        for name, plain in (("stride", 1), ("padding", 0), ("dilation", 1))
    }
    return Problem(kernel, image=image, window=window, **options, **alike)  # type: ignore[arg-type]


def drawn(rng: random.Random, dtype: str) -> Problem:
    """Any problem with a result of some size: of a few numbers all may happen to be near zero."""
    while True:
        found = _drawn(rng, dtype)
        if prod(found.result(1)) >= 32:
            return found


def _drawn(rng: random.Random, dtype: str) -> Problem:
    dims = rng.choice([1, 2, 3])
    groups = rng.choice([1, 1, 2, 3])
    window = tuple(rng.randint(1, 6 if dims < 3 else 3) for _ in range(dims))
    dilation = tuple(rng.randint(1, 3) for _ in range(dims))
    padding = tuple(rng.randint(0, 4) for _ in range(dims))
    spans = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    image = tuple(
        max(1, k - 2 * p) + rng.randint(0, 12 if dims < 3 else 5)
        for k, p in zip(spans, padding, strict=True)
    )
    depthwise = rng.random() < 0.3
    channels = groups * (1 if depthwise else rng.randint(1, 4))
    return Problem(
        rng.choice(KERNELS),
        channels,
        groups * rng.randint(1, 3),
        image,
        window,
        tuple(rng.randint(1, 3) for _ in range(dims)),
        padding,
        dilation,
        groups,
        dtype,
    )


def operands(problem: Problem, size: int) -> tuple[Tensor, Tensor]:
    """Random operands for so many samples."""
    dtype = getattr(torch, problem.dtype)
    one, other = problem.operands(size)
    return torch.randn(one).to(dtype), torch.randn(other).to(dtype)


def wanted(problem: Problem, one: Tensor, other: Tensor) -> Tensor:
    """The kernel in float64, by torch."""
    return native(replace(problem, dtype="float64"), one.double(), other.double())


def distance(found: Tensor, true: Tensor, scale: float = 0.0) -> float:
    """Relative L2; of what is nothing but padding, relative to `scale`."""
    size = float(true.norm())
    return float((found.double() - true).norm()) / (size if size > 0 else scale)


def bound(problem: Problem, own: float) -> float:
    """What an algorithm may be off, where torch's own kernel is off by `own`."""
    return 1e-12 if problem.dtype == "float64" else max(1e-6, 2 * own)


def computed(way: Plain | Fourier, problem: Problem, one: Tensor, other: Tensor) -> Tensor:
    """Return a kernel of all samples at once."""
    if problem.kernel == "filter":
        return way.finish(problem, way.add(problem, None, one, other))
    return way.part(problem, one, way.shared(problem, other))


def any_circles(problem: Problem, rng: random.Random) -> tuple[Circle, ...]:
    """Return circles for a problem, in each direction one of those that there are."""
    return tuple(rng.choice(found) for found in options(problem))


def divided(
    problem: Problem, size: int, policy: str
) -> tuple[list[KernelPart], list[Configuration]]:
    """Return the measured parts of a kernel, and the configurations that are made of them."""
    parts = Costs().parts(problem, size, policy, 1 << 40)
    return parts, front(parts, size)
