"""The command `anybatch`: train, plan, check, profile, bench and report.

typer reads the options; everything they do is in `train` and in the library, and how a command ends
is in `outcome`.
"""

from __future__ import annotations

import dataclasses
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from anybatch.cli.bench import bench
from anybatch.cli.compare import compare as compare_trainings
from anybatch.cli.explain import check, plan
from anybatch.cli.faults import SettingsError, terminable
from anybatch.cli.options import (
    BatchNormOption,
    BatchSizeOption,
    CompareOption,
    CompareStepsOption,
    CropOption,
    CropsOption,
    DataOption,
    DecayOption,
    DeviceOption,
    EpochsOption,
    FlipOption,
    LossOption,
    LrOption,
    MallocOption,
    MaxBatchOption,
    MemoryOption,
    MicroBatchOption,
    MinutesOption,
    ModelOption,
    MomentumOption,
    NormOption,
    OffloadOption,
    OptimizerOption,
    OutOption,
    OverwriteOption,
    PadOption,
    RecipeOption,
    ReplanOption,
    ResumeOption,
    ScheduleOption,
    SeedOption,
    SharedOption,
    SizeOption,
    SkipOption,
    SpillOption,
    StatesOption,
    TaskOption,
    ThreadsOption,
    WorkersOption,
)
from anybatch.cli.outcome import ending, summary_table
from anybatch.cli.process import allocate
from anybatch.cli.profiled import profile
from anybatch.cli.progress import make_progress
from anybatch.cli.report.write import report
from anybatch.cli.saved_run import SavedRun
from anybatch.cli.settings import Settings, parse_image_size
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
def train(
    context: typer.Context,
    *,
    data: DataOption = "digits",
    task: TaskOption = None,
    model: ModelOption = None,
    batch_size: BatchSizeOption = 1024,
    memory: MemoryOption = None,
    micro_batch: MicroBatchOption = None,
    offload: OffloadOption = "auto",
    states: StatesOption = None,
    spill: SpillOption = None,
    workspace: SharedOption = None,
    epochs: EpochsOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    replan: ReplanOption = False,
    compare: CompareOption = False,
    compare_steps: CompareStepsOption = 20,
    recipe: RecipeOption = None,
    lr: LrOption = None,
    optimizer: OptimizerOption = None,
    momentum: MomentumOption = None,
    weight_decay: DecayOption = None,
    schedule: ScheduleOption = None,
    loss: LossOption = None,
    norm: NormOption = "group",
    batchnorm: BatchNormOption = "exact",
    max_batch: MaxBatchOption = None,
    image_size: SizeOption = None,
    crop: CropOption = None,
    crops: CropsOption = 1,
    pad: PadOption = None,
    flip: FlipOption = None,
    seed: SeedOption = 0,
    workers: WorkersOption = 0,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    malloc: MallocOption = "auto",
    skip_corrupt: SkipOption = False,
    overwrite: OverwriteOption = False,
    checkpoint_minutes: MinutesOption = 10.0,
) -> None:
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
        if compare:
            team.refuse("compare")
        _refuse_together(resume=resume is not None, replan=replan, compare=compare)
        if compare:
            _refuse_leaving(offload, states, spill)
        budgeted = memory is not None or (resume is not None and SavedRun.read(resume).budgeted)
        allocated = allocate(context, malloc, device, budgeted=budgeted)
        console.print(allocated, highlight=False, soft_wrap=True)
        team.meet(device)
        settings = Settings(
            data=data,
            out=out or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S"),
            task=task,
            model=model,
            recipe=recipe,
            batch_size=batch_size,
            memory=memory,
            micro_batch=micro_batch,
            offload=offload,
            states=states,
            spill=spill,
            workspace=workspace,
            epochs=epochs,
            lr=lr,
            optimizer=optimizer,
            momentum=momentum,
            weight_decay=weight_decay,
            schedule=schedule,
            loss=loss,
            norm=norm,
            batchnorm=batchnorm,
            max_batch=max_batch,
            image_size=None if image_size is None else parse_image_size(image_size),
            crop=crop,
            crops=crops,
            pad=pad,
            flip=flip,
            seed=seed,
            workers=workers,
            threads=threads,
            device=device,
            skip_corrupt=skip_corrupt,
            overwrite=overwrite,
            checkpoint_minutes=checkpoint_minutes,
        )
        if compare:
            console.print(compare_trainings(settings, compare_steps))
            return
        progress = make_progress(console)
        if resume is None:
            summary = run_training(settings, progress, team=team)
        else:
            named = _named_settings(context, settings)
            summary = resume_training(resume, named, progress, replan=replan, team=team)
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
