"""The steps that do not fit: hundreds of MiB of saved tensors, or more than 4 GiB."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.mbs.models import ResNet, TransformerLM, UNet
from benchmarks.mbs.problem import Problem


def _cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _transformer(batch: int, *, width: int, layers: int, heads: int, length: int) -> Problem:
    tokens = torch.randint(256, (batch, length + 1))
    model = TransformerLM(width=width, layers=layers, heads=heads, length=length)
    return Problem(model, _cross_entropy, None, tokens[:, :-1], tokens[:, 1:], batch)


def resnet18(batch: int) -> Problem:
    """ResNet-18 of width 32 on images of 32 pixels."""
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    return Problem(ResNet(width=32), nn.CrossEntropyLoss(), None, x, y, batch)


def unet(batch: int) -> Problem:
    """A U-Net of width 16 on images of 96 pixels."""
    x, y = torch.randn(batch, 3, 96, 96), (torch.rand(batch, 1, 96, 96) > 0.7).float()
    return Problem(UNet(width=16), nn.BCEWithLogitsLoss(), None, x, y, batch)


def transformer(batch: int) -> Problem:
    """A causal transformer of 6 layers of width 256 on 128 tokens."""
    return _transformer(batch, width=256, layers=6, heads=8, length=128)


def deep(batch: int) -> Problem:
    """A causal transformer of 80 layers of width 128 on 256 tokens."""
    return _transformer(batch, width=128, layers=80, heads=4, length=256)


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "ResNet-18": resnet18,
    "U-Net": unet,
    "transformer": transformer,
    "deep transformer": deep,
}
SIZES = {"ResNet-18": 256, "U-Net": 64, "transformer": 64}
"""Samples of the steps of which half must do."""
LARGE = ("deep transformer", 32)
"""Of which autograd saves more than 4 GiB."""
SMALL = 2
"""Samples of a step that only loads what torch loads late."""


def made(name: str, batch: int) -> Problem:
    """Return a problem, of the same numbers in every process."""
    torch.manual_seed(0)
    return PROBLEMS[name](batch)
