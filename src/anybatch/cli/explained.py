"""`anybatch plan --convolutions`: the table and the picture of a plan's convolutions.

The plan is made inside `anybatch.convolutions`, so that its measurements are in the file; the table
reads it from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from anybatch import Plan
from anybatch import convolutions as divided
from anybatch.cli.build import RunParts
from anybatch.cli.faults import SettingsError
from anybatch.cli.kernels import console_of, draw_fronts, refuse_without_rows, summary_of, table_of
from anybatch.cli.settings import AUTO
from anybatch.cli.timeline import write
from anybatch.cli.views import LoadedBatch
from anybatch.kernels import KernelBenchmark, MeasuredKernel, keys_of, record_kernels
from anybatch.units import parse_bytes

UNTAKEN = "Convolutions are torch's own: no share of the budget was worth it as their workspace."


@dataclass(frozen=True)
class Explained:
    """Options of the command on convolutions.

    Attributes:
        workspace: that of each, the argument, or "auto"; None: they are torch's.
        total: bytes for all of them together; None: each has its own.
        cache: file of measurements; None is the one in the user's cache folder.
        wanted: there is to be a table.
        prints: and it is to be printed.
    """

    workspace: str | int | None
    total: int | None
    cache: Path | None
    wanted: bool
    prints: bool

    @classmethod
    def of(
        cls,
        workspace: str | int | None,
        total: str | None,
        cache: Path | None,
        memory: str | None,
        *,
        convolutions: bool,
        json: bool,
    ) -> Explained:
        """Return the convolution request in the options of the command.

        Raises:
            SettingsError: they do not go together, or mean nothing.
        """
        if (total is not None or cache is not None) and not convolutions and workspace is None:
            raise SettingsError(
                "workspace-total and cache are for convolutions; neither --convolutions nor "
                "--workspace was given. Add one."
            )
        if workspace == AUTO and (total is not None or cache is not None):
            raise SettingsError(
                "workspace-total and cache are for a workspace in bytes; workspace is auto, which "
                "divides the budget itself and keeps what it measures in your cache folder. Leave "
                "them out."
            )
        try:
            total_bytes = None if total is None else parse_bytes(total, "workspace-total")
            if convolutions and workspace is None:
                workspace = total_bytes or _default(memory)
            if workspace not in (None, AUTO):
                parse_bytes(workspace, "workspace", word=AUTO)
        except ValueError as error:
            raise SettingsError(f"{error}.") from error
        return cls(workspace, total_bytes, cache, convolutions, not json)

    @property
    def share(self) -> str | None:
        """Workspace setting that the plan has to choose by itself: "auto", or None."""
        return AUTO if self.workspace == AUTO else None

    @contextmanager
    def context(self) -> Iterator[None]:
        """Divide the convolutions of the body, if any are to be in so many bytes."""
        if self.workspace is None or self.workspace == AUTO:
            yield
            return
        with divided(self.workspace, cache=self.cache or True):
            yield

    def rows(self, plan: Plan, parts: RunParts, batch: LoadedBatch) -> list[MeasuredKernel]:
        """Return the kernels of a plan; none where no table is requested."""
        if not self.wanted or plan.convolutions is None:
            return []
        refuse_without_rows(batch.inputs)
        parts.model.train()
        found = plan.convolutions
        recorder = record_kernels(parts.model, batch.inputs)
        benchmark = KernelBenchmark(found.workspace, policy=found.policy, cache=self.cache or True)
        return benchmark.choose(recorder, keys_of(found), self.total)

    def show(self, rows: list[MeasuredKernel], picture: Path | None) -> None:
        """Print the table, and draw the picture if a file was named."""
        if not self.wanted:
            return
        console = console_of(stderr=not self.prints)
        if self.workspace == AUTO and not rows:
            console.print(UNTAKEN, soft_wrap=True)
            return
        if self.prints:
            console.print(table_of(rows))
            console.print(summary_of(rows), soft_wrap=True)
        if picture is not None:
            write(draw_fronts(rows), picture)
            console.print(f"The convolutions are drawn in {picture}.", markup=False, soft_wrap=True)


def _default(memory: str | None) -> int:
    """Return the default workspace: no more than a quarter of the budget."""
    usual = parse_bytes(KernelBenchmark.WORKSPACE)
    return usual if memory is None else min(usual, max(1, parse_bytes(memory) // 4))
