"""Summary of a run as one frozen value, returned by `train` and stored in summary.json."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The end of a run.

    `metric` names the metric of `best`, `last` and `train_last` ("accuracy" or "iou", on the test
    set except `train_last`); None before the first full epoch. `seconds` is the wall time of all,
    `train_seconds` that of the training steps and their data; `images_per_second` is training
    images over the latter. All three count every part of a run that was `resumed` so many times.
    `stopped` says why a run ended early. `malloc` is the host allocator's mode: see `allocator`.
    `ranks` is how many processes shared each mini-batch; but for `micro_batch`, figures are those
    of all of them. `timeline` names the picture of the planned step in the run folder, or says why
    there is none; None where nothing was foreseen. `report` is the same of the page about the run;
    None where no folder is written. `exact_from` is the epoch from which on an adaptive BatchNorm
    was exact.
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
    malloc: str
    versions: dict[str, str]
    ranks: int = 1
    exact_from: int | None = None
    resumed: int
    interrupted: bool
    stopped: str | None
    run_folder: str | None
    timeline: str | None = None
    report: str | None = None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during `train`: all was saved, and `summary` has the progress."""

    def __init__(self, summary: Summary, *, terminated: bool = False) -> None:
        super().__init__("training was interrupted")
        self.summary, self.terminated = summary, terminated


def versions() -> dict[str, str]:
    """Return the versions a result depends on."""
    found: dict[str, Any] = {"anybatch": metadata.version("anybatch"), "torch": torch.__version__}
    return {**found, "python": platform.python_version(), "system": platform.platform()}


def figures(rows: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """Return the best and the last figures of the epochs' lines, as `Summary` names them."""
    empty = {f"test_{metric}": None, f"train_{metric}": None, "epoch": None, "test_loss": None}
    best = max(rows, key=lambda row: row[f"test_{metric}"], default=empty)
    last = rows[-1] if rows else empty
    return {
        "metric": metric,
        "best": best[f"test_{metric}"],
        "best_epoch": best["epoch"],
        "last": last[f"test_{metric}"],
        "train_last": last[f"train_{metric}"],
        "last_loss": last["test_loss"],
    }


def epoch_line(row: Mapping[str, Any], epochs: int) -> str:
    """Return one line of text for an epoch's line of the log."""
    metric = row["metric"]
    return (
        f"epoch {row['epoch']}/{epochs}: loss {row['train_loss']:.4f}, "
        f"test loss {row['test_loss']:.4f}, test {metric} {row[f'test_{metric}']:.4f}, "
        f"{row['images_per_second']:,.0f} images/s"
    )
