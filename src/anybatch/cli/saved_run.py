"""Run that is in a folder already: its settings, and whether it can be resumed.

To resume with other settings would be another run under the first one's name: its curves, its
schedule and its summary would be of neither. So the settings come from config.json, and one that is
passed with `--resume` must be the same, except those without effect on the result: the device, the
threads, the readers and how often a checkpoint is written. If the run is planned anew, the
arguments of a plan may differ too.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from anybatch.cli.faults import RunFolderError, SettingsError
from anybatch.cli.settings import Settings
from anybatch.units import parse_bytes

FREE = ("device", "threads", "workers", "checkpoint_minutes")
PLANNED = ("memory", "micro_batch", "offload", "states", "spill", "workspace")


@dataclass(frozen=True)
class SavedRun:
    """Run in the folder `path`; `config` is the contents of its config.json."""

    path: Path
    config: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> SavedRun:
        """Read config.json.

        Raises:
            RunFolderError: when `path` is no run folder.
        """
        try:
            config = json.loads((path / "config.json").read_text())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
            raise RunFolderError(
                f"resume needs a run folder, with a config.json; {path} has none that can be read "
                f"({reason}). Give the folder of an earlier run."
            ) from error
        return cls(path, config)

    @property
    def budgeted(self) -> bool:
        """Whether the run has a budget of memory."""
        settings = self.config.get("settings") if isinstance(self.config, dict) else None
        return isinstance(settings, dict) and settings.get("memory") is not None

    @property
    def ranks(self) -> int:
        """How many processes trained it."""
        return int(self.config.get("process", {}).get("ranks", 1))

    def settings(self, requested: Mapping[str, Any], *, replan: bool = False) -> Settings:
        """Return the run's settings, with new values of those that may differ.

        With `replan` a new memory without a micro-batch has that chosen anew.

        Raises:
            RunFolderError: when config.json is of another version of the command.
            SettingsError: when another one differs; all that do are named. When `replan` has
                nothing to plan.
        """
        try:
            found = dict(self.config["settings"])
            if found["image_size"] is not None:
                found["image_size"] = tuple(found["image_size"])
            found |= {"out": self.path, "overwrite": False}
            settings = Settings(**found)
        except (KeyError, TypeError) as error:
            raise RunFolderError(
                f"config.json in {self.path} must hold the settings of this version of anybatch; "
                f"it was written by another ({error}). Use that version, or start a new run."
            ) from error
        free = (*FREE, *PLANNED) if replan else FREE
        faults = list(self._changes(settings, requested, free))
        if faults:
            raise SettingsError(
                f"a resumed run keeps its settings: {'; '.join(faults)}. Leave the option out, or "
                "start a new run with another --out."
            )
        changed = {name: value for name, value in requested.items() if name in free}
        if "memory" in changed:
            changed.setdefault("micro_batch", None)
        settings = dataclasses.replace(settings, **changed).checked()
        if replan and not settings.planned:
            raise SettingsError(
                "replan needs something to plan; the run keeps to micro-batches of "
                f"{settings.micro_batch} and has no budget. Name one with --memory, or leave "
                "--replan out."
            )
        return settings

    def finished(self) -> Summary | None:
        """Return the run's summary if it came to its end, else None.

        One that was killed before its report was written ends once more: its summary is there.
        """
        try:
            found = json.loads((self.path / "summary.json").read_text())
            names = [field.name for field in dataclasses.fields(Summary)]
            summary = Summary(**{name: found[name] for name in names if name in found})
        except (OSError, ValueError, TypeError):
            return None
        complete = summary.epochs == self.config["recipe"]["epochs"] and summary.report is not None
        return summary if complete and not summary.interrupted and not summary.stopped else None

    def refuse_other(self, now: Mapping[str, Any]) -> None:
        """Refuse to go on with other data, or other defaults, than the run's.

        `now` is the contents that config.json would have today.

        Raises:
            RunFolderError: naming every entry that differs.
        """
        faults = [
            f"{name} was {was!r} and is {new!r}"
            for part in ("recipe", "data")
            for name, was, new in _differing(self.config[part], now[part])
        ]
        if faults:
            raise RunFolderError(
                f"a resumed run needs the data and the recipe it had: {'; '.join(faults)}. Restore "
                "them, or start a new run with another --out."
            )

    def warnings(self, now: Mapping[str, Any]) -> Iterator[str]:
        """Yield a warning for each change of version, device or threads that breaks exactness."""
        for part, names in (
            ("versions", ("anybatch", "torch", "python")),
            ("process", ("device", "threads")),
        ):
            for name, was, new in _differing(self.config[part], now[part]):
                if name in names:
                    yield (
                        f"warning: {name} was {was} and is {new}; the run goes on, but its last "
                        "bits are only those of an unbroken one with the same versions, device "
                        "and threads"
                    )

    def _changes(
        self, settings: Settings, requested: Mapping[str, Any], free: tuple[str, ...]
    ) -> Iterator[str]:
        for name, new in requested.items():
            was = getattr(settings, name)
            if was is None:
                was = self.config["recipe"].get(name)
            if name == "out":
                same = new is not None and Path(new).resolve() == self.path.resolve()
            elif name == "memory":
                same = name in free or _bytes(new) == _bytes(was)
            else:
                same = name in free or new == was
            if not same:
                yield f"{name.replace('_', '-')} was {_text(was)}, got {_text(new)}"


def _differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    now = json.loads(json.dumps(now))  # as it would be read: lists for tuples
    for name in {**was, **now}:
        if was.get(name) != now.get(name):
            yield name, was.get(name), now.get(name)


def _bytes(memory: Any) -> Any:
    """Return the bytes that a memory means, so that "1MiB" is "1024KiB"; else itself."""
    try:
        return parse_bytes(memory)
    except ValueError:
        return memory


def _text(value: Any) -> str:
    return "x".join(map(str, reversed(value))) if isinstance(value, tuple) else str(value)


# Summary of a run as one frozen value, returned by `train` and stored in summary.json.


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The end of a run.

    `metric` names the metric of `best`, `last` and `train_last` ("accuracy" or "iou", on the test
    set except `train_last`); None before the first full epoch. `seconds` is the wall time of all,
    `train_seconds` that of the training steps and their data; `images_per_second` is training
    images over the latter. All three count every part of a run that was `resumed` so many times.
    `stopped` says why a run ended early. `malloc` is the host allocator's mode: see `allocator`.
    `ranks` is how many processes shared each mini-batch; but for `micro_batch`, figures are those
    of all of them. `report` names the page about the run, or says why there is none; None where no
    folder is written. `exact_from` is the epoch from which on an adaptive BatchNorm was exact,
    `exact` the evidence of the last step's plan, None before a step.
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
    exact: str | None = None
    resumed: int
    interrupted: bool
    stopped: str | None
    run_folder: str | None
    report: str | None = None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during `train`: all was saved, and `summary` has the progress."""

    def __init__(self, summary: Summary, *, terminated: bool = False) -> None:
        super().__init__("training was interrupted")
        self.summary, self.terminated = summary, terminated


def versions() -> dict[str, str]:
    """Return the versions a result depends on."""
    found = {name: metadata.version(name) for name in ("anybatch", "torch")}
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
