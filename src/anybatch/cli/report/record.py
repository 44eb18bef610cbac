"""Record of a run or of a plan: all data that a page is made from, and nothing else."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from anybatch import Plan
from anybatch.cli.report.envelope import Envelope
from anybatch.cli.report.history import RunHistory
from anybatch.cli.settings import Settings

NONE = RunHistory()
"""The log of a plan without training."""


@dataclass(frozen=True)
class RunRecord:
    """A run, or a plan that nothing was trained by.

    Attributes:
        command: which of the two.
        config: contents of config.json, written or not.
        summary: contents of summary.json; None for a plan, and for a run that has not ended.
        history: contents of the log; empty for a plan.
        plan: None where there is none.
        step: the planned step; None where it was not foreseen or is not saved.
        notes: missing parts and reasons, a sentence each.
    """

    command: Literal["train", "plan"]
    config: Mapping[str, Any]
    summary: Mapping[str, Any] | None = None
    history: RunHistory = NONE
    plan: Plan | None = None
    step: Envelope | None = None
    notes: tuple[str, ...] = ()

    def part(self, name: str) -> Mapping[str, Any]:
        """Return a part of the config, empty where it is missing or no mapping."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}

    @property
    def ranks(self) -> int:
        """How many processes train together."""
        found = self.part("process").get("ranks", 1)
        return found if isinstance(found, int) else 1

    @property
    def words(self) -> str:
        """The command that does the same, with the options that are not as they are by default."""
        start = f"torchrun --nproc-per-node={self.ranks} -m anybatch" if self.ranks > 1 else ""
        words = [*(start or "anybatch").split(), self.command, *self._options()]
        return shlex.join(words)

    def _options(self) -> Iterator[str]:
        settings = self.part("settings")
        for field in dataclasses.fields(Settings):
            value, name = settings.get(field.name), field.name.replace("_", "-")
            if field.name not in settings or value == field.default:
                continue
            if isinstance(value, bool):
                yield f"--{name}" if value else f"--no-{name}"
            elif field.name == "image_size" and isinstance(value, list | tuple):
                yield from (f"--{name}", "x".join(map(str, reversed(value))))
            else:
                yield from (f"--{name}", str(value))
