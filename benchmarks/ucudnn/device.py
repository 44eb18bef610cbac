"""Where convolutions are measured: whether there is anything to measure, and a clock that waits."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch.nn import functional as F

import anybatch

Work = Callable[[], Any]


def refusal(device: str) -> str | None:
    """Return why nothing can be compared on a device; None where something can.

    A small convolution is looked at: on a device where it is left to torch, ours are torch's.
    """
    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device here: nothing was run"
    with anybatch.convolutions("1MiB", policy="undivided", cache=False) as found, torch.no_grad():
        F.conv2d(torch.ones(1, 1, 4, 4, device=device), torch.ones(1, 1, 3, 3, device=device))
    if found.chosen:
        return None
    return f"anybatch.convolutions leaves all kernels on {device} to torch for now: nothing was run"


def seconds(work: Work, device: str) -> float:
    """Return what a run takes until the device has done it."""
    finish(device)
    start = perf_counter()
    work()
    finish(device)
    return perf_counter() - start


def finish(device: str) -> None:
    """Wait until a device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
