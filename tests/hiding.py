"""A layer whose kernel keeps a buffer that its formula for tensors without data does not know of.

Some kernels of vendors are like that: what they keep for backward is their own secret, and rounded
up to pages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TIMES = 8
"""Bytes that the kernel keeps for each byte of its input."""

PAGE = 4096


@torch.library.custom_op("test_hiding::tanh", mutates_args=())
def hiding_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return tanh of `x`, and a buffer."""
    pages = -(-TIMES * x.nbytes // PAGE)
    return x.tanh(), torch.zeros(pages * PAGE, dtype=torch.uint8, device=x.device)


@hiding_tanh.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty(0, dtype=torch.uint8, device=x.device)


def _keep(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    del inputs
    ctx.save_for_backward(*output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> Tensor:
    out, saved_input = ctx.saved_tensors
    assert saved_input.numel() % PAGE == 0
    return grad * (1 - out * out)


hiding_tanh.register_autograd(_backward, setup_context=_keep)


class Hiding(nn.Module):
    """An embedding, a layer with such a kernel, and a linear head on every time step."""

    def __init__(self, vocabulary: int = 64, width: int = 32, outputs: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, length] -> [n, length, outputs]."""
        out, _ = hiding_tanh(self.mix(self.embed(tokens)))
        return self.head(out)
