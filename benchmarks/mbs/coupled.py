"""Losses in which samples meet: no sum over micro-batches is the loss of the batch.

They have no terms. A loop by hand needs two passes, and dividing each micro-batch's loss by
the number of micro-batches computes another loss altogether.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.mbs.losses import CLASSES, SIDE, Maker, Written, binary, draw_labels


def dice(n: int) -> Written:
    """BCE + Dice over the whole batch (MBS, Eq. 18-20): the pixels of all samples meet."""

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        share = o.sigmoid()
        overlap = 2 * (share * t).sum() / (share.sum() + t.sum())
        return functional.binary_cross_entropy_with_logits(o, t) + 1 - overlap

    return Written(loss_fn, binary(CLASSES, SIDE, SIDE)(n))


def _scores(outputs: Any) -> tuple[Tensor, Tensor]:
    return functional.normalize(outputs[0], dim=-1), functional.normalize(outputs[1], dim=-1)


def info_nce(_n: int) -> Written:
    """Contrast two encoders' outputs over the batch: the other samples are the negatives."""

    def loss_fn(outputs: Any) -> Tensor:
        a, b = _scores(outputs)
        return functional.cross_entropy(a @ b.T / 0.2, torch.arange(len(a), device=a.device))

    return Written(loss_fn, None)


def gram(n: int) -> Written:
    """A loss on the batch's own matrix of similarities, z @ z.T."""

    def loss_fn(z: Tensor, labels: Tensor) -> Tensor:
        same = (labels[:, None] == labels).to(z.dtype)
        return functional.mse_loss(z @ z.T, same)

    return Written(loss_fn, draw_labels((n,), None))


COUPLED_MAPS: dict[str, Maker] = {"bce_dice": dice}
COUPLED_VALUES: dict[str, Maker] = {"gram": gram}
COUPLED_PAIRS: dict[str, Maker] = {"info_nce": info_nce}
