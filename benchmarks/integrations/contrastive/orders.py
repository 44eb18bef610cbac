"""Loops written by hand that differ only in the order of encoders: what the order alone costs.

GradCache runs one encoder over all micro-batches and then the other. An engine has one model, which
returns both embeddings of a micro-batch, so encoders take turns, and both graphs wait for backward.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.integrations.contrastive.encoders import SUBJECTS
from benchmarks.integrations.contrastive.ways import matrix

Step = Callable[[], None]


def _gradients(z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    z.requires_grad_()
    w.requires_grad_()
    of_z, of_w = torch.autograd.grad(matrix(z, w), (z, w))
    return of_z, of_w


def one_after_the_other(f: nn.Module, g: nn.Module, x: Tensor, y: Tensor, n: int) -> Step:
    """All of one encoder, and then all of the other, in both passes."""

    def step() -> None:
        with torch.no_grad():
            z, w = (
                torch.cat([net(part) for part in torch.split(t, n)]) for net, t in ((f, x), (g, y))
            )
        for net, t, gradient in zip((f, g), (x, y), _gradients(z, w), strict=True):
            for part, rows in zip(torch.split(t, n), torch.split(gradient, n), strict=True):
                net(part).backward(rows)

    return step


def _interleaved(pull: Callable[..., None]) -> Callable[..., Step]:
    def make(f: nn.Module, g: nn.Module, x: Tensor, y: Tensor, n: int) -> Step:
        def step() -> None:
            with torch.no_grad():
                pairs = [
                    (f(a), g(b)) for a, b in zip(torch.split(x, n), torch.split(y, n), strict=True)
                ]
            z, w = (torch.cat(part) for part in zip(*pairs, strict=True))
            of_z, of_w = _gradients(z, w)
            for a, b, c, d in zip(
                torch.split(x, n),
                torch.split(y, n),
                torch.split(of_z, n),
                torch.split(of_w, n),
                strict=True,
            ):
                pull(f, g, a, b, c, d)

        return step

    return make


def _each(f: nn.Module, g: nn.Module, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    f(a).backward(c)
    g(b).backward(d)


def _both(f: nn.Module, g: nn.Module, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    torch.autograd.backward((f(a), g(b)), (c, d))


ORDERS = {
    "one encoder after the other": one_after_the_other,
    "in turn, a graph at a time": _interleaved(_each),
    "in turn, both graphs": _interleaved(_both),
}


def orders(name: str, batch: int, n: int, count: int) -> dict[str, float]:
    """Seconds of each order as a share of the first's: medians of rounds in turn."""
    subject = SUBJECTS[name]
    rows, seconds = subject.rows(batch), dict[str, list[float]]()
    steps = {order: make(*subject.encoders(), *rows, n) for order, make in ORDERS.items()}
    for index in range(-2, count):
        for order in steps if index % 2 else reversed(steps):
            start = time.perf_counter()
            steps[order]()
            if index >= 0:
                seconds.setdefault(order, []).append(time.perf_counter() - start)
    first = seconds[next(iter(ORDERS))]
    return {
        order: round(statistics.median(a / b for a, b in zip(found, first, strict=True)), 4)
        for order, found in seconds.items()
    }
