"""How the command ends: a table, or one line on the error stream and an exit code.

typer prints a traceback for every exception. A user needs the fault and the remedy; a job scheduler
must distinguish a fault (1) from Ctrl-C (130) and from its own SIGTERM (143).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from anybatch.cli.faults import Terminated, in_options
from anybatch.cli.saved_run import Interrupted, Summary
from anybatch.errors import AnybatchError

if TYPE_CHECKING:
    from anybatch.cli.team import Team

INTERRUPTED, TERMINATED = 130, 143  # exit codes: 128 + the number of the signal


@contextlib.contextmanager
def ending(team: Team | None = None, single: str = "") -> Iterator[None]:
    """Convert a user's error into one line, for all ranks, and an exit code.

    `single`: the name of a command that must be run by one process.
    """
    errors = Console(stderr=True)

    def say(text: str, *, speaks: bool = team is None or team.leads) -> None:
        if speaks:
            errors.print(text, markup=False, highlight=False, soft_wrap=not errors.is_terminal)

    try:
        if team is not None and single:
            team.refuse(single)
        yield
    except Interrupted as stop:
        summary = stop.summary
        say(
            f"interrupted after step {summary.steps} ({summary.epochs} whole epochs); checkpoint "
            f"and summary are in {summary.run_folder}; go on with --resume {summary.run_folder}"
        )
        raise typer.Exit(TERMINATED if stop.terminated else INTERRUPTED) from None
    except KeyboardInterrupt as stop:
        say("interrupted before a step was taken; nothing was trained")
        terminated = isinstance(stop, Terminated)
        raise typer.Exit(TERMINATED if terminated else INTERRUPTED) from None
    except AnybatchError as error:
        say(f"error: {in_options(str(error))}", speaks=team is None or team.speaks())
        raise typer.Exit(1) from None


def summary_table(summary: Summary) -> Table:
    """Return the main figures of a run, as a table."""

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.2f} %"

    name = "test IoU" if summary.metric == "iou" else "test accuracy"
    table = Table(show_header=False, title=f"{summary.model}, {summary.parameters:,} parameters")
    table.add_column()
    table.add_column(overflow="fold")
    rows = {
        "epochs": str(summary.epochs),
        "batch": str(summary.batch_size),
        "micro-batch": str(summary.micro_batch),
        name: percent(summary.last),
        **({"ranks": str(summary.ranks)} if summary.ranks > 1 else {}),
        **({"exact": summary.exact.partition(":")[0]} if summary.exact else {}),
        **({"BatchNorm": f"exact from epoch {at}"} if (at := summary.exact_from) else {}),
        "seconds": f"{summary.seconds:.1f}",
        "images/s": f"{summary.images_per_second:,.0f}",
        "run folder": summary.run_folder or "-",
        **({"report": summary.report} if summary.report else {}),
    }
    for row in rows.items():
        table.add_row(*row)
    return table
