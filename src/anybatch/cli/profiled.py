"""`anybatch profile`: where the seconds of a training loop go, on the user's data and machine.

The loop is that of `anybatch train` with the same options; nothing is trained and nothing written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from anybatch import profile as profile_loop
from anybatch.cli.build import BatchNormPolicy, RunParts, build, make_optimizer, seeded
from anybatch.cli.data import corrupt
from anybatch.cli.devices import allocate
from anybatch.cli.faults import DataError, SettingsError
from anybatch.cli.options import settings_of
from anybatch.cli.outcome import ending
from anybatch.cli.planned import maker_of, refuse_to_plan
from anybatch.cli.settings import AUTO, Settings
from anybatch.cli.team import Team
from anybatch.cli.views import LoadedBatch

DONE = "Nothing was trained: all was put back."


def profile(context: typer.Context, options: SimpleNamespace) -> None:
    """Run and measure steps of a training loop, and print its profile."""
    with ending(Team.here(), single="profile"):
        if options.steps < 1:
            raise SettingsError(f"steps must be at least 1; got {options.steps}.")
        if options.workspace == AUTO:
            raise SettingsError(
                "workspace must be bytes where one loop is measured; got auto. Name it, such as "
                "--workspace 64MiB; plan --workspace auto finds one."
            )
        allocated = allocate(
            context, options.malloc, options.device, budgeted=options.memory is not None
        )
        settings = settings_of(options)
        with seeded(options.seed, options.threads):
            parts = build(settings)
            if settings.planned:
                refuse_to_plan(settings, parts.device)
            parts.model.train()
            stepped = make_optimizer(parts.recipe, parts.model.parameters())
            make = maker_of(parts, stepped, BatchNormPolicy(settings, options.batch_size))
            names = "memory", "micro_batch", "workspace"
            engine = make(**{name: getattr(options, name) for name in names})
            with moving("profiling", options.steps) as move:
                found = profile_loop(
                    *(loader_of(settings, parts), engine, stepped),
                    steps=options.steps,
                    split=split_of(skip=options.skip_corrupt),
                    progress=lambda done, _all: move(done),
                )
        typer.echo(found.to_json() if options.json else "\n".join([allocated, str(found), DONE]))


def loader_of(settings: Settings, parts: RunParts) -> Any:
    """Return torch's own loader of the training views, at its first epoch."""
    loader = parts.loader(settings, shuffle=True)
    loader.epoch(1)
    return loader.torch


def split_of(*, skip: bool) -> Callable[[LoadedBatch], tuple[Any, Any]]:
    """Return a function that splits a mini-batch in two, and refuses files that cannot be read."""

    def split(batch: LoadedBatch) -> tuple[Any, Any]:
        if batch.unreadable and not skip:
            raise corrupt(batch.unreadable)
        if not len(batch.inputs):
            raise DataError("no sample of a mini-batch could be read. Check the files.")
        return batch.inputs, batch.targets

    return split


@contextlib.contextmanager
def moving(title: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a bar where there is a terminal; yield its update by a count and a text."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    errors, last = Console(stderr=True), TextColumn("{task.fields[last]}")
    hidden = not errors.is_terminal
    with Progress(*columns, last, console=errors, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=total, last="")
        yield lambda done, last="": bar.update(task, completed=done, last=last)
