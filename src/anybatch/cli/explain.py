"""Commands `anybatch plan` and `anybatch check`: forecast of training, and test of exactness.

Both use the first mini-batch of the training data, train nothing and write nothing but the picture
of `--timeline FILE.png` and the page of `--html FILE.html`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from anybatch import Plan
from anybatch import check as check_gradients
from anybatch.cli.build import BatchNormPolicy, RunParts, build, describe, seeded
from anybatch.cli.devices import absent_device, refuse_measured
from anybatch.cli.explained import Explained
from anybatch.cli.options import (
    BatchNormOption,
    BatchSizeOption,
    CacheOption,
    ConvolutionsOption,
    CropOption,
    DataOption,
    DeadlineOption,
    DeviceOption,
    GpusOption,
    HtmlOption,
    JsonOption,
    LossOption,
    MallocOption,
    MaxBatchOption,
    MeasureOption,
    MemoryOption,
    MicroBatchOption,
    ModelOption,
    MomentumOption,
    NetworkOption,
    NormOption,
    OffloadOption,
    OptimizerOption,
    PictureArgument,
    PlannedDeviceOption,
    RecipeOption,
    SeedOption,
    ServersOption,
    SharedOption,
    SizeOption,
    SkipOption,
    SpeedupOption,
    SpillOption,
    StatesOption,
    TaskOption,
    ThreadsOption,
    TimelineOption,
    TotalOption,
)
from anybatch.cli.outcome import ending
from anybatch.cli.planned import question_of, refuse_to_plan
from anybatch.cli.process import allocate
from anybatch.cli.progress import Silent
from anybatch.cli.report.history import Envelope
from anybatch.cli.report.record import RunRecord
from anybatch.cli.report.write import page_of, refuse_page, write_page
from anybatch.cli.settings import Settings, make_optimizer, parse_image_size
from anybatch.cli.team import Team
from anybatch.cli.timeline import NONE, colored, refuse_picture, write_picture
from anybatch.cli.views import LoadedBatch, Reading
from anybatch.cli.wanted import Wanted
from anybatch.devices import planned_for
from anybatch.reports import StepTimeline

UNTIMED = "Nothing was trained, and no size was timed: --measure times those that fit."
TIMED = "Nothing was trained: some micro-batches of each size were timed, and all was put back."
NOT_RUN = "Nothing was trained, and nothing was run: the device is not there."
NO_CHOICE = "Nothing was trained, and no size was timed: there is none to choose."


def plan(
    context: typer.Context,
    picture: PictureArgument = None,
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
    measure: MeasureOption = False,
    gpus: GpusOption = None,
    speedup: SpeedupOption = None,
    deadline: DeadlineOption = None,
    network: NetworkOption = None,
    servers: ServersOption = None,
    timeline: TimelineOption = False,
    convolutions: ConvolutionsOption = False,
    workspace_total: TotalOption = None,
    cache: CacheOption = None,
    json: JsonOption = False,
    html: HtmlOption = None,
    recipe: RecipeOption = None,
    optimizer: OptimizerOption = None,
    momentum: MomentumOption = None,
    loss: LossOption = None,
    norm: NormOption = "group",
    batchnorm: BatchNormOption = "exact",
    max_batch: MaxBatchOption = None,
    image_size: SizeOption = None,
    crop: CropOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    device: PlannedDeviceOption = None,
    malloc: MallocOption = "auto",
    skip_corrupt: SkipOption = False,
) -> None:
    """Explain a step's plan, memory and time, as a database explains a query; train nothing.

    The plan is that of `train` for the first mini-batch of the training data; with --batchnorm
    adaptive, that of the epochs before BatchNorm becomes exact.
    """
    team = Team.here()
    with ending(team):
        team.refuse("plan")
        refuse_picture(picture, timeline=timeline, json=json, convolutions=convolutions)
        if html is not None:
            refuse_page(html)
        explained = Explained.of(
            *(workspace, workspace_total, cache, memory), convolutions=convolutions, json=json
        )
        wanted = Wanted.of(gpus, speedup, deadline, network, servers)
        wanted.refuse(states)
        measure, target = measure or wanted.anything, absent_device(device)
        refuse_measured(target, measure=measure, workspace=explained.workspace is not None)
        with planned_for(target):
            budgeted = memory is not None and target is None
            allocated = allocate(context, malloc, device, budgeted=budgeted)
        settings = Settings(
            data=data,
            task=task,
            model=model,
            batch_size=batch_size,
            memory=memory,
            micro_batch=micro_batch,
            offload=offload,
            states=states,
            spill=spill,
            workspace=explained.workspace,
            recipe=recipe,
            optimizer=optimizer,
            momentum=momentum,
            loss=loss,
            norm=norm,
            batchnorm=batchnorm,
            max_batch=max_batch,
            image_size=None if image_size is None else parse_image_size(image_size),
            crop=crop,
            seed=seed,
            threads=threads,
            device=device,
            skip_corrupt=skip_corrupt,
        )
        with seeded(seed, threads), planned_for(target):
            parts, batch = first_batch(settings)
            refuse_to_plan(settings, parts.device)
            stepped = make_optimizer(parts.recipe, parts.model.parameters())
            question = question_of(
                settings, parts, stepped, BatchNormPolicy(settings, batch_size), batch
            )
            with explained.context():
                found = question.answer(explained.share, states, timed=measure)
            step, config = question.engine_of(found).timeline(), describe(settings, parts)
            if measure:
                found = wanted.measured(question, found, settings, parts, stepped)
            rows = explained.rows(found, parts, batch)
        lines = [
            allocated,
            str(found),
            *wanted.lines(found, parts, context),
            _not_done(found, measured=measure, fixed=micro_batch is not None),
        ]
        typer.echo(found.to_json() if json else "\n".join(lines))
        explained.show(rows, picture)
        if timeline:
            _draw(step, picture, chart=not json)
        if html is not None:
            shown = None if step is None else Envelope.of(step)
            write_page(page_of(RunRecord("plan", config, plan=found, step=shown)), html)
            typer.echo(f"The plan is explained in {html}.", err=json)


def check(
    *,
    data: DataOption = "digits",
    task: TaskOption = None,
    model: ModelOption = None,
    batch_size: Annotated[int, typer.Option(help="Samples of the batch that is checked.")] = 8,
    recipe: RecipeOption = None,
    loss: LossOption = None,
    norm: NormOption = "group",
    image_size: SizeOption = None,
    crop: CropOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    skip_corrupt: SkipOption = False,
) -> None:
    """Compare the gradient in micro-batches with that of the full batch, on real data.

    Exit code 1 when they differ by more than rounding; the report says where, and why.
    """
    team = Team.here()
    with ending(team):
        team.refuse("check")
        settings = Settings(
            data=data,
            task=task,
            model=model,
            batch_size=batch_size,
            recipe=recipe,
            loss=loss,
            norm=norm,
            image_size=None if image_size is None else parse_image_size(image_size),
            crop=crop,
            seed=seed,
            threads=threads,
            device=device,
            skip_corrupt=skip_corrupt,
        )
        with seeded(seed, threads):
            parts, batch = first_batch(settings)
            report = check_gradients(parts.model, parts.loss, (batch.inputs, batch.targets))
        typer.echo(str(report))
    if not report.exact:
        raise typer.Exit(1)


def _draw(step: StepTimeline | None, picture: Path | None, *, chart: bool) -> None:
    """Print a step as a chart, and draw it to a file if one was named."""
    out = Console(stderr=not chart, highlight=False, soft_wrap=True)
    if step is None:
        out.print(NONE)
        return
    if chart:
        out.print(colored(step), markup=False)
    if picture is not None:
        out.print(write_picture(step, picture), markup=False)


def _not_done(found: Plan, *, measured: bool, fixed: bool) -> str:
    """Return the sentence on measurements that a plan lacks, and how to request them."""
    if found.device is not None:
        return NOT_RUN
    sizes = found.memory.candidates if found.memory is not None else ()
    if any(size.seconds is not None for size in sizes):
        return TIMED
    return NO_CHOICE if measured or fixed else UNTIMED


def first_batch(settings: Settings) -> tuple[RunParts, LoadedBatch]:
    """Return the parts of a run, its model in training mode, and its first mini-batch."""
    parts = build(settings)
    reading = Reading(Silent(), skip_corrupt=settings.skip_corrupt)
    _, batch = next(reading.epoch(parts.loader(settings, shuffle=True), 1))
    parts.model.train()
    return parts, batch
