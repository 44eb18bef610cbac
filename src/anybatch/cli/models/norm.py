"""The normalisation layer of every built-in model, chosen by name.

BatchNorm makes the samples of a batch meet, so a network with it needs more than micro-batches to
be exact. GroupNorm (Wu and He 2018) normalises each sample by itself; torch has it, but it needs a
number of groups that divides the channels, which a network of any width cannot fix beforehand.
"""

from __future__ import annotations

from typing import get_args

from torch import nn

from anybatch.cli.faults import ModelError
from anybatch.cli.settings import NormName

MOST_GROUPS = 32
LEAST_CHANNELS = 4  # in one group: with fewer, 1x1 feature maps would be normalised to a constant


def groups_for(channels: int) -> int:
    """Return the largest divisor of `channels` that is <= 32 and leaves >= 4 channels a group."""
    most = min(MOST_GROUPS, max(1, channels // LEAST_CHANNELS))
    return max(groups for groups in range(1, most + 1) if channels % groups == 0)


def make_norm(norm: str, channels: int) -> nn.Module:
    """Return a normalisation layer for [N, `channels`, H, W]: `norm` is "group" or "batch".

    Raises:
        ModelError: for any other name.
    """
    if norm == "group":
        return nn.GroupNorm(groups_for(channels), channels)
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    raise ModelError(f"norm must be one of {', '.join(get_args(NormName))}; got {norm!r}.")
