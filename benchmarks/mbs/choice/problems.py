"""The problems whose micro-batch is to be chosen: a step of the whole batch is under 2 s."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.mbs.models import ResNet, TransformerLM, UNet
from benchmarks.mbs.problem import Problem, term


def _logits_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="sum")


def _next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _next_token_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


def resnet20(batch: int = 256) -> Problem:
    """ResNet-20 with GroupNorm on 32x32 images, cross-entropy."""
    sums = term(lambda o, t: functional.cross_entropy(o, t, reduction="sum"))
    inputs, targets = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    model = ResNet(blocks=(3, 3, 3))
    return Problem(model, torch.nn.CrossEntropyLoss(), None, inputs, targets, batch, (sums,))


def unet96(batch: int = 32) -> Problem:
    """A U-Net on 96x96 images, pixel-wise binary cross-entropy."""
    inputs, targets = torch.randn(batch, 3, 96, 96), (torch.rand(batch, 1, 96, 96) > 0.7).float()
    sums = term(_logits_sum, Tensor.numel)
    return Problem(UNet(), torch.nn.BCEWithLogitsLoss(), None, inputs, targets, batch, (sums,))


def transformer(batch: int = 256) -> Problem:
    """A causal transformer on sequences of 64 tokens."""
    tokens = torch.randint(256, (batch, 65))
    sums = term(_next_token_sum, Tensor.numel)
    return Problem(
        TransformerLM(), _next_token, None, tokens[:, :-1], tokens[:, 1:], batch, (sums,)
    )


PROBLEMS: dict[str, Callable[..., Problem]] = {
    "resnet20": resnet20,
    "unet96": unet96,
    "transformer": transformer,
}
