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

from anybatch import Engine
from anybatch import profile as profile_loop
from anybatch.cli.build import BatchNormPolicy, RunParts, build, seeded
from anybatch.cli.data import corrupt
from anybatch.cli.faults import DataError, SettingsError
from anybatch.cli.options import WORKSPACE, settings_of, takes
from anybatch.cli.outcome import ending
from anybatch.cli.planned import refuse_to_plan
from anybatch.cli.process import allocate
from anybatch.cli.settings import AUTO, Settings, make_optimizer
from anybatch.cli.team import Team
from anybatch.cli.views import LoadedBatch

DONE = "Nothing was trained: all was put back."


@takes(
    "data task model batch_size memory micro_batch workspace steps workers json recipe "
    "optimizer momentum loss norm batchnorm max_batch image_size crop crops pad flip seed "
    "threads device malloc skip_corrupt",
    workspace=WORKSPACE,
    steps=(int, "That are measured, after two that are not.", 20),
    json=(bool, "Print the profile as JSON, and only that."),
)
def profile(context: typer.Context, options: SimpleNamespace) -> None:
    """Show where a training loop's seconds go, which are hidden, and how to reduce the rest.

    A few real steps are run, with real loading, and undone. Time not hidden behind computing is
    overhead: R_O is its ratio to computing, and bounds the gain by more GPUs.
    """
    team = Team.here()
    with ending(team):
        team.refuse("profile")
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
            engine = Engine(
                parts.model,
                parts.loss,
                memory=options.memory,
                optimizer=stepped,
                micro_batch=options.micro_batch,
                batchnorm=BatchNormPolicy(settings, options.batch_size).batchnorm,
                workspace=options.workspace,
            )
            with moving(options.steps) as move:
                found = profile_loop(
                    *(loader_of(settings, parts), engine, stepped),
                    steps=options.steps,
                    split=split_of(skip=options.skip_corrupt),
                    progress=move,
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
def moving(steps: int) -> Iterator[Callable[[int, int], None]]:
    """Show the progress, where there is a terminal; yield the function that advances it."""
    columns = (TextColumn("profiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=steps)
        yield lambda done, _all: bar.update(task, completed=done)
