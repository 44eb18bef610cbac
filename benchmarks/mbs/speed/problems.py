"""The steps that the speed table times: sizes of a fraction of a second on one core."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.mbs.models import ResNet, TransformerLM, UNet
from benchmarks.mbs.problem import Problem, Term, term

IGNORE = -100


def _bce_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="sum")


def bce_dice(outputs: Tensor, targets: Tensor) -> Tensor:
    share = outputs.sigmoid()
    dice = 2 * (share * targets).sum() / (share.sum() + targets.sum())
    return functional.binary_cross_entropy_with_logits(outputs, targets) + 1 - dice


def _next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _next_token_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


def resnet18() -> Problem:
    """ResNet-18 with GroupNorm on 32x32 images, cross-entropy."""
    sums = term(lambda o, t: functional.cross_entropy(o, t, reduction="sum"))
    inputs, targets = torch.randn(92, 3, 32, 32), torch.randint(10, (92,))
    return Problem(ResNet(), torch.nn.CrossEntropyLoss(), None, inputs, targets, 92, (sums,))


def _unet(loss_fn: Callable[[Any, Any], Tensor], *terms: Term) -> Problem:
    targets = (torch.rand(22, 1, 96, 96) > 0.7).float()
    return Problem(UNet(), loss_fn, None, torch.randn(22, 3, 96, 96), targets, 22, terms)


def unet96() -> Problem:
    """A U-Net on 96x96 images, pixel-wise binary cross-entropy."""
    return _unet(torch.nn.BCEWithLogitsLoss(), term(_bce_sum, Tensor.numel))


def unet96_dice() -> Problem:
    """The same U-Net with BCE + Dice over the batch: a loss in which samples meet."""
    return _unet(bce_dice)


def transformer() -> Problem:
    """A causal transformer of 64 tokens, some of them ignored."""
    tokens = torch.randint(256, (60, 65))
    targets = tokens[:, 1:].masked_fill(torch.rand(60, 64) < 0.2, IGNORE)
    sums = term(_next_token_sum, lambda t: (t != IGNORE).sum())
    return Problem(TransformerLM(), _next_token, None, tokens[:, :-1], targets, 60, (sums,))


STEPS: dict[str, tuple[Callable[[], Problem], int]] = {  # name -> problem, micro-batch
    "resnet18": (resnet18, 32),
    "unet96": (unet96, 8),
    "transformer": (transformer, 16),
    "unet96_dice": (unet96_dice, 8),
}
