"""How a run ended, as one frozen value: what `train` returns and summary.json holds."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The end of a run.

    `metric` names what `best`, `last` and `train_last` measure ("accuracy" or "iou", on the test
    set but for `train_last`); None before the first whole epoch. `seconds` is the wall time of all,
    `train_seconds` that of the training steps and their data; `images_per_second` is training
    images over the latter. `stopped` says why a run ended early.
    """

    metric: str
    best: float | None
    best_epoch: int | None
    last: float | None
    train_last: float | None
    last_loss: float | None
    epochs: int
    steps: int
    batch_size: int
    micro_batch: int
    images: int
    seconds: float
    train_seconds: float
    images_per_second: float
    model: str
    parameters: int
    train_samples: int
    test_samples: int
    skipped: int
    seed: int
    threads: int
    device: str
    versions: dict[str, str]
    interrupted: bool
    stopped: str | None
    run_folder: str | None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `train`: everything was saved, and `summary` says how far it came."""

    def __init__(self, summary: Summary) -> None:
        super().__init__("training was interrupted")
        self.summary = summary


def versions() -> dict[str, str]:
    """Return the versions a result depends on."""
    found: dict[str, Any] = {"anybatch": metadata.version("anybatch"), "torch": torch.__version__}
    return {**found, "python": platform.python_version(), "system": platform.platform()}
