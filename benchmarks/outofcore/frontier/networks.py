"""The three networks, and the blocks that a person would checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from anybatch.cli.models.resnet import Residual, resnet20
from benchmarks.mbs.models import Attention, TransformerLM
from benchmarks.mbs.problem import Problem
from benchmarks.outofcore.models import Dense, densenet121


@dataclass(frozen=True)
class Network:
    """A step of one network.

    Attributes:
        title: what it is called.
        make: makes it, and a mini-batch.
        block: the class of its blocks.
    """

    title: str
    make: Callable[[], Problem]
    block: type[nn.Module]

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return its blocks, in order."""
        return [module for module in model.modules() if isinstance(module, self.block)]


def _images(model: nn.Module, n: int, pixels: int) -> Problem:
    x, y = torch.randn(n, 3, pixels, pixels), torch.randint(10, (n,))
    return Problem(model, nn.CrossEntropyLoss(), None, x, y, n)


def _next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _tokens(model: nn.Module, n: int, length: int) -> Problem:
    tokens = torch.randint(256, (n, length + 1))
    return Problem(model, _next_token, None, tokens[:, :-1], tokens[:, 1:], n)


NETWORKS = {
    "resnet": Network(
        "ResNet-20, 40 images of 32x32",
        lambda: _images(resnet20(norm="batch"), 40, 32),
        Residual,
    ),
    "densenet": Network(
        "DenseNet of 4, 8 and 6 layers, 12 images of 96x96",
        lambda: _images(densenet121(10, 16, (4, 8, 6)), 12, 96),
        Dense,
    ),
    "transformer": Network(
        "transformer of 6 layers, 12 texts of 128 tokens",
        lambda: _tokens(TransformerLM(width=128, layers=6, length=128), 12, 128),
        Attention,
    ),
}
