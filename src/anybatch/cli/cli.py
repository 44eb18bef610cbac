"""The command `anybatch`: train, plan, check, profile, bench and report.

typer reads the options; everything they do is in `train` and in the library, and how a command ends
is in `outcome`.
"""

from __future__ import annotations

import dataclasses
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.console import Console

from anybatch.cli.bench import bench
from anybatch.cli.compare import compare as compare_trainings
from anybatch.cli.explain import check, plan
from anybatch.cli.faults import SettingsError, terminable
from anybatch.cli.options import settings_of, takes
from anybatch.cli.outcome import ending, summary_table
from anybatch.cli.process import allocate
from anybatch.cli.profiled import profile
from anybatch.cli.progress import make_progress
from anybatch.cli.report.write import report
from anybatch.cli.saved_run import SavedRun
from anybatch.cli.settings import Settings
from anybatch.cli.team import Team
from anybatch.cli.train import resume as resume_training
from anybatch.cli.train import train as run_training

app = typer.Typer(
    help="Any batch size, in the memory you have, with the gradient of the full batch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001
    if wanted:
        typer.echo(f"anybatch {metadata.version('anybatch')}")
        raise typer.Exit


@app.callback()
def _main(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train with any batch size, in the memory you have, with the gradient of the full batch."""


@app.command()
@takes(
    "data task model batch_size memory micro_batch offload states spill workspace epochs out "
    "resume replan compare compare_steps recipe lr optimizer momentum weight_decay schedule "
    "loss norm batchnorm max_batch image_size crop crops pad flip seed workers threads device "
    "malloc skip_corrupt overwrite checkpoint_minutes"
)
def train(context: typer.Context, options: SimpleNamespace) -> None:
    """Train a model with mini-batches of any size, streamed in micro-batches.

    Data: digits (built in); DIR/{train,test}/CLASS/*.png; DIR/CLASS/*.png; or, for segmentation,
    DIR/{image,label}/*.png with masks of 0 and 255. Without a test folder a fifth is held out.

    Name the --memory that a step may hold, and the fastest micro-batch that fits is found. A run
    that was stopped, by Ctrl-C or by anything else, goes on with --resume RUN.

    Several processes, started by torchrun as "-m anybatch train", share every mini-batch.
    """
    team = Team.here()
    console = Console(quiet=not team.leads)
    with team, ending(team), terminable():
        if options.compare:
            team.refuse("compare")
        _refuse_together(
            resume=options.resume is not None, replan=options.replan, compare=options.compare
        )
        if options.compare:
            _refuse_leaving(options.offload, options.states, options.spill)
        budgeted = options.memory is not None or (
            options.resume is not None and SavedRun.read(options.resume).budgeted
        )
        allocated = allocate(context, options.malloc, options.device, budgeted=budgeted)
        console.print(allocated, highlight=False, soft_wrap=not console.is_terminal)
        team.meet(options.device)
        settings = settings_of(
            options, out=options.out or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")
        )
        if options.compare:
            console.print(compare_trainings(settings, options.compare_steps))
            return
        progress = make_progress(console)
        if options.resume is None:
            summary = run_training(settings, progress, team=team)
        else:
            named = _named_settings(context, settings)
            summary = resume_training(
                options.resume, named, progress, replan=options.replan, team=team
            )
        console.print(summary_table(summary))
        if summary.skipped:
            plural = ("file", "was") if summary.skipped == 1 else ("files", "were")
            console.print(
                f"{summary.skipped} {plural[0]} could not be read and {plural[1]} skipped."
            )


app.command()(plan)
app.command()(profile)
app.command()(bench)
app.command()(check)
app.command()(report)


def _refuse_together(*, resume: bool, replan: bool, compare: bool) -> None:
    if replan and not resume:
        raise SettingsError(
            "replan needs a run whose plan is made anew; --resume was not given. Add --resume RUN, "
            "or leave --replan out: a new run is always planned."
        )
    if compare and resume:
        raise SettingsError(
            "compare needs trainings from their first step; --resume was given too. Leave one out."
        )


def _refuse_leaving(offload: str, states: str | None, spill: str | None) -> None:
    """Refuse to compare where tensors are to be offloaded.

    Raises:
        SettingsError: something is to.
    """
    options = (("offload", offload, "auto"), ("states", states, None), ("spill", spill, None))
    left = [f"--{name} {value}" for name, value, default in options if value != default]
    if left:
        raise SettingsError(
            "compare trains with everything in memory, as a loop by hand does; "
            f"{', '.join(left)} was given too. Leave it out."
        )


def _named_settings(context: typer.Context, settings: Settings) -> dict[str, Any]:
    """Return the settings that were named on the command line."""
    names = {field.name for field in dataclasses.fields(Settings)}
    return {
        name: getattr(settings, name)
        for name in context.params
        if name in names
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
