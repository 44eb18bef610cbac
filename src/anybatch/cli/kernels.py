"""`anybatch plan --convolutions`: kernels by layer, their seconds, workspace and division.

The plan is made inside `anybatch.convolutions`, so that its measurements are in the file; the table
reads it from there.

layer   kernel    samples   torch's   chosen       takes   workspace   gain
0       forward        32    81.2 ms  fft@4 x 8   9.6 ms     9.1 MiB   8.5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from anybatch import Plan
from anybatch import convolutions as divided
from anybatch.cli.build import RunParts
from anybatch.cli.faults import SettingsError, as_setting
from anybatch.cli.settings import AUTO
from anybatch.cli.views import LoadedBatch
from anybatch.kernels import KernelBenchmark, MeasuredKernel, keys_of, record_kernels
from anybatch.units import parse_bytes, parse_share, show_bytes

WIDE = 110
"""Columns of a table that are not shown on a terminal."""


def name_of(row: MeasuredKernel) -> str:
    """Return the layers of a kernel in a few words."""
    more = f" and {len(row.layers) - 1} more" if len(row.layers) > 1 else ""
    return f"{row.layers[0]}{more}" if row.layers else "-"


def table_of(rows: Iterable[MeasuredKernel]) -> Table:
    """Return the kernels as a table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("layer", "kernel", "samples", "torch's", "chosen", "takes", "workspace", "gain"):
        right = name not in ("layer", "kernel", "chosen")
        folds = name == "chosen"
        table.add_column(
            name, justify="right" if right else "left", no_wrap=not folds, overflow="fold"
        )
    for row in rows:
        problem, size = row.key
        chosen = row.chosen
        best = [str(chosen), _ms(chosen.seconds), show_bytes(chosen.workspace)]
        gain = f"{row.seconds / chosen.seconds:.1f}"
        ours = [*best, gain] if chosen.divided else ["torch's own", "", "", ""]
        cells = [name_of(row), problem.kernel, str(size), _ms(row.seconds), *ours]
        table.add_row(*map(Text, cells))
    return table


def console_of() -> Console:
    """Return where tables go: as wide as the terminal, or wide enough for a file or a pipe."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, width=WIDE)


def summary_of(rows: Sequence[MeasuredKernel]) -> str:
    """Return one line on all kernels together: seconds before and after, and workspace."""
    if not rows:
        return "The model has no convolutions that could be divided."
    before, after = sum(r.seconds for r in rows), sum(r.chosen.seconds for r in rows)
    most = max(r.chosen.workspace for r in rows)
    count = sum(r.chosen.divided for r in rows)
    return (
        f"{count} of {len(rows)} kernels are not torch's own: {_ms(before)} become {_ms(after)} "
        f"({before / after:.1f} times as fast) with {show_bytes(most)} of workspace."
    )


def refuse_without_rows(inputs: Tensor) -> None:
    """Refuse to record a model without samples.

    Raises:
        SettingsError: there are none.
    """
    if not len(inputs):
        raise SettingsError(
            "convolutions are recorded with a sample or more; the data have none that can be read."
        )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


UNTAKEN = "Convolutions are torch's own: no share of the budget was worth it as their workspace."


@dataclass(frozen=True)
class Explained:
    """Options of the command on convolutions.

    `workspace`: that of each, the argument, or "auto"; None: they are torch's. `total`: bytes for
    all of them together; None: each has its own. `cache`: file of measurements; None is the one in
    the user's cache folder. `wanted`: there is to be a table.
    """

    workspace: str | int | None
    total: int | None
    cache: Path | None
    wanted: bool

    @classmethod
    def of(cls, options: SimpleNamespace) -> Explained:
        """Return the convolution request in the options of the command.

        Raises:
            SettingsError: they do not go together, or mean nothing.
        """
        workspace, convolutions = options.workspace, options.convolutions
        total, cache = options.workspace_total, options.cache
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
        with as_setting():
            total_bytes = None if total is None else parse_bytes(total, "workspace-total")
            if convolutions and workspace is None:
                workspace = total_bytes or _default(options.memory)
            if workspace not in (None, AUTO):
                parse_bytes(workspace, "workspace", word=AUTO)
        return cls(workspace, total_bytes, cache, convolutions)

    @property
    def share(self) -> str | None:
        """Workspace setting that the plan has to choose by itself: "auto", or None."""
        return AUTO if self.workspace == AUTO else None

    def context(self) -> AbstractContextManager[object]:
        """Divide the convolutions of the body, if any are to be in so many bytes."""
        if self.workspace is None or self.workspace == AUTO:
            return nullcontext()
        return divided(self.workspace, cache=self.cache or True)

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

    def show(self, rows: list[MeasuredKernel]) -> None:
        """Print the table."""
        if not self.wanted:
            return
        console = console_of()
        if self.workspace == AUTO and not rows:
            console.print(UNTAKEN, soft_wrap=True)
            return
        console.print(table_of(rows))
        console.print(summary_of(rows), soft_wrap=True)


def _default(memory: str | None) -> int:
    """Return the default workspace: no more than a quarter of the budget."""
    usual = parse_bytes(KernelBenchmark.WORKSPACE)
    share = memory is None or parse_share(memory)
    return usual if share else min(usual, max(1, parse_bytes(memory) // 4))
