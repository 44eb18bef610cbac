"""A small model of words for Trainers: rows have uneven counts of labels, batches a tail of one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N = 33


class Words(nn.Module):
    """A loss over the labels that count, of which every row has another number."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.inner(x) * self.scale
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def made() -> nn.Module:
    torch.manual_seed(0)
    return Words().double()


def rows() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(N, 4, 3, generator=draw, dtype=torch.float64)
    labels = torch.randint(5, (N, 4), generator=draw)
    labels[torch.arange(4) > (torch.arange(N) % 4)[:, None]] = -100
    return [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)]


def stacked(some: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in some]) for name in ("x", "labels")}
