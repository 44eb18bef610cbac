"""Convolution kernels of a model, layer by layer: their seconds, workspace and division.

layer   kernel    samples   torch's   chosen       takes   workspace   gain
0       forward        32    81.2 ms  fft@4 x 8   9.6 ms     9.1 MiB   8.5
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from anybatch.cli.faults import SettingsError
from anybatch.kernels import MeasuredKernel
from anybatch.units import show_bytes

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


def console_of(stderr: bool = False) -> Console:  # noqa: FBT001, FBT002
    """Return where tables go: as wide as the terminal, or wide enough for a file or a pipe."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=WIDE)


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
