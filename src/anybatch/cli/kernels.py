"""Convolution kernels of a model, layer by layer: their seconds, workspace and division.

layer   kernel    samples   torch's   chosen       takes   workspace   gain
0       forward        32    81.2 ms  fft@4 x 8   9.6 ms     9.1 MiB   8.5
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from anybatch.cli.faults import SettingsError
from anybatch.conv.chooser import certain, divided, own_of, worthwhile
from anybatch.conv.costs import Costs
from anybatch.conv.divide import Configuration, KernelPart
from anybatch.conv.network import Key
from anybatch.conv.recorder import KernelRecorder
from anybatch.conv.share import share
from anybatch.core.tree import tensors
from anybatch.core.units import show_bytes

WIDE = 110
"""Columns of a table that are not shown on a terminal."""

ROWS = 2
"""Samples with which a model's kernels are recorded: one may be laid out in another way."""


@dataclass(frozen=True)
class Row:
    """A kernel of one or several layers that are alike.

    Attributes:
        layers: their names.
        key: the kernel, and its samples.
        seconds: that torch's own takes.
        front: possible configurations; the last one is the fastest.
        chosen: the chosen one.
    """

    layers: tuple[str, ...]
    key: Key
    seconds: float
    front: tuple[Configuration, ...]
    chosen: Configuration

    @property
    def name(self) -> str:
        """The layers in a few words."""
        more = f" and {len(self.layers) - 1} more" if len(self.layers) > 1 else ""
        return f"{self.layers[0]}{more}" if self.layers else "-"


def kernels_of(model: nn.Module, inputs: Tensor) -> KernelRecorder:
    """Record the kernels of a forward and a backward on a few samples; restore all state.

    Args:
        model: in the mode in which it is trained; its buffers are restored.
        inputs: [N, ...], of which the first two samples are taken.
    """
    x = inputs[:ROWS].to(next(model.parameters()).device)
    buffers = [buffer.clone() for buffer in model.buffers()]
    gradients = [p.grad for p in model.parameters()]
    with torch.random.fork_rng(), KernelRecorder(model) as recorder:
        torch.stack([t.sum() for _, t in tensors(model(x))]).sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return recorder


def at_size(recorder: KernelRecorder, recorded_samples: int, size: int) -> list[Key]:
    """Return the recorded kernels with their samples scaled to `size`."""
    return [(problem, max(1, n * size // recorded_samples)) for problem, n in recorder.keys]


def rows_of(
    found: Mapping[Key, Sequence[KernelPart]],
    recorder: KernelRecorder,
    costs: Costs,
    limit: int,
    total: int | None = None,
) -> list[Row]:
    """Return kernels with the configuration chosen for each, in the order in which they run.

    Args:
        found: their measurements.
        recorder: knows their layers.
        costs: knows duels, or fights them, as when kernels are run.
        limit: bytes of workspace for each.
        total: bytes for all of them together, divided so that all together are fastest. Default
            None: each has `limit`.
    """
    fronts = {
        key: certain(costs, key[0], worthwhile(list(parts), key[1], total or limit))
        for key, parts in found.items()
    }
    chosen = [front[-1] for front in fronts.values()]
    if total is not None:
        chosen = share(list(fronts.values()), total)
    return [
        Row(
            tuple(recorder.layers(key[0])),
            key,
            own_of(found[key], key[1]).seconds,
            tuple(fronts[key]),
            one,
        )
        for key, one in zip(fronts, chosen, strict=True)
    ]


def table_of(rows: Iterable[Row]) -> Table:
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
        ours = [*best, gain] if divided(chosen) else ["torch's own", "", "", ""]
        cells = [row.name, problem.kernel, str(size), _ms(row.seconds), *ours]
        table.add_row(*map(Text, cells))
    return table


def console_of(stderr: bool = False) -> Console:  # noqa: FBT001, FBT002
    """Return where tables go: as wide as the terminal, or wide enough for a file or a pipe."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=WIDE)


def summary_of(rows: Sequence[Row]) -> str:
    """Return one line on all kernels together: seconds before and after, and workspace."""
    if not rows:
        return "The model has no convolutions that could be divided."
    before, after = sum(r.seconds for r in rows), sum(r.chosen.seconds for r in rows)
    most = max(r.chosen.workspace for r in rows)
    count = sum(divided(r.chosen) for r in rows)
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
