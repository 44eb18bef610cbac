"""Four ways to the gradient of a mini-batch of padded rows.

By hand, each micro-batch's mean is divided by their number, as most loops do it. Rows of like
length are often put together, so that less is padded: then a token of a short row counts many times
what one of a long row does. The mini-batch is the same in all four; only its division differs.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from anybatch import Engine
from benchmarks.integrations.language.text import IGNORED, Batch, batch_of

Arm = Literal["undivided", "anybatch", "by hand", "by hand, by length"]
ARMS: tuple[Arm, ...] = ("undivided", "anybatch", "by hand", "by hand, by length")
Backward = Callable[[list[bytes]], float]
"""Adds the gradient of a mini-batch, and returns its loss."""


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens that are no padding."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def backward_of(arm: Arm, model: nn.Module, micro_batch: int) -> Backward:
    """Return what adds the gradient of a mini-batch, the way an arm does it."""
    if arm == "anybatch":
        engine = Engine(model, loss_of, micro_batch=micro_batch)
        return lambda rows: float(engine.backward(*batch_of(rows)))
    if arm == "undivided":
        return lambda rows: _one(model, batch_of(rows), 1)

    def by_hand(rows: list[bytes]) -> float:
        rows = sorted(rows, key=len) if arm == "by hand, by length" else rows
        parts = [rows[at : at + micro_batch] for at in range(0, len(rows), micro_batch)]
        return sum(_one(model, batch_of(part), len(parts)) for part in parts)

    return by_hand


def _one(model: nn.Module, batch: Batch, steps: int) -> float:
    loss = loss_of(model(batch[0]), batch[1]) / steps
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def error_of(arm: Arm, model: nn.Module, rows: list[bytes], micro_batch: int) -> float:
    """Return the distance of an arm's gradient from the undivided one, as a share of its length."""
    found = []
    for one in (arm, "undivided"):
        model.zero_grad()
        backward_of(one, model, micro_batch)(rows)
        every = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append(torch.cat(every))
    model.zero_grad()
    mine, true = found
    return float((mine - true).norm() / true.norm())
