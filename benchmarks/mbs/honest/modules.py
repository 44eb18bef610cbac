"""One network for each module of torch's own module database, and a loss for each of its losses.

The database gives constructor and inputs. Its batch is made `ROWS` long by taking samples again,
each scaled by a number of its own, and a parameter before the module makes it a network.
"""

import sys
import unittest
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.mbs.honest.subjects import ROWS, SUBJECTS, Problem, Subject

DEVICE = torch.device("cpu")
RECURRENT = ("RNN", "LSTM", "GRU")
FULL = 3
"""Dimensions of a batch of sequences; one less is a sequence without a batch."""


def database() -> list[Any]:
    """The module database; `expecttest`, which its tests need and it does not, may be absent."""
    try:
        import expecttest  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        stub: Any = ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


class Scaled(nn.Module):
    """A module behind one number of each floating input; its first tensor is the output."""

    def __init__(self, inner: nn.Module, count: int) -> None:
        super().__init__()
        self.inner = inner
        self.scales = nn.Parameter(torch.linspace(0.8, 1.2, count))

    def forward(self, *inputs: Tensor) -> Any:
        """The inputs of the module -> its first output."""
        found = self.inner(*_scaled(inputs, self.scales))
        return found[0] if isinstance(found, tuple) else found


class Before(nn.Module):
    """What stands before a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.full((1,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] -> the same."""
        return x * self.scales


def _scaled(inputs: Any, scales: Tensor) -> list[Tensor]:
    return [x * s if x.is_floating_point() else x for x, s in zip(inputs, scales, strict=True)]


def _longer(x: Tensor, size: int) -> Tensor:
    """`ROWS` samples, made of `size`."""
    found = x.detach()[torch.arange(ROWS) % size]
    if not found.is_floating_point():
        return found
    return found * torch.linspace(0.7, 1.0, ROWS).view(-1, *[1] * (x.dim() - 1))


def _problem(module: nn.Module, inputs: tuple[Tensor, ...], *, loss: bool) -> Problem:
    size = len(inputs[0])
    rows = tuple(_longer(x, size) for x in inputs)
    if loss:
        module(*rows)  # a device may take targets out of range without a word
        first, *others = rows
        targets = others[0] if len(others) == 1 else tuple(others)
        return Problem(Before(), first, targets, _Unpacked(module, len(others)))
    return Problem(Scaled(module, len(rows)), rows, None, _square)


class _Unpacked:
    """A loss of several targets, which come as a tuple."""

    def __init__(self, inner: nn.Module, count: int) -> None:
        self.inner, self.count = inner, count

    def __call__(self, outputs: Tensor, targets: Any) -> Tensor:
        found: Tensor = self.inner(outputs, *(targets if self.count > 1 else (targets,)))
        return found


def _square(found: Tensor) -> Tensor:
    if not found.is_floating_point():
        raise TypeError("the output is no number that has a gradient")
    return nn.functional.mse_loss(found, torch.zeros_like(found))


def _usable(info: Any) -> Iterator[tuple[nn.Module, tuple[Tensor, ...], bool]]:
    """Modules and inputs of which the first dimension is the batch, and no option is a tensor's."""
    name, loss = info.module_cls.__name__, info.module_cls.__name__.endswith("Loss")
    for sample in info.module_inputs_func(info, DEVICE, torch.float64, True, True):
        made, forward_input = sample.constructor_input, sample.forward_input
        if forward_input is None or forward_input.kwargs or "no_batch_dim" in sample.desc:
            continue
        inputs = forward_input.args
        batched = all(isinstance(x, Tensor) and x.dim() for x in inputs) and len(inputs) > 0
        if not batched or len({len(x) for x in inputs}) > 1 or not len(inputs[0]):
            continue
        if loss and (len(inputs) < 2 or made.kwargs.get("reduction", "mean") != "mean"):
            continue
        timed = name in RECURRENT or name.startswith(("Transformer", "Multihead"))
        if timed and (made.kwargs.get("batch_first") is not True or inputs[0].dim() < FULL):
            continue
        yield info.module_cls(*made.args, **made.kwargs), inputs, loss


def register() -> None:
    """Register a network for each module; one without usable inputs cannot be made."""
    for info in database():
        name = f"nn.{info.module_cls.__name__}"
        if name not in SUBJECTS:
            rng = "batch" if "Fractional" in name else None
            SUBJECTS[name] = Subject(name, "torch's module database", partial(_made, info), rng=rng)


def _made(info: Any) -> Problem:
    found = next(_usable(info), None)
    if found is None:
        raise LookupError("the database has no inputs whose first dimension is the batch")
    module, inputs, loss = found
    with torch.no_grad():
        module(*(x.detach() for x in inputs))  # a lazy module takes its shapes
    return _problem(module, inputs, loss=loss)
