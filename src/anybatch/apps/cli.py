"""The command `anybatch`: train, and check.

typer reads the options; everything they do is in `train` and in the library. A fault of the person
ends in one line on the error stream and exit code 1, Ctrl-C in one line and 130.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from anybatch import AnybatchError
from anybatch import check as check_gradients
from anybatch.apps.build import build, seeded
from anybatch.apps.data import corrupt
from anybatch.apps.faults import DataError
from anybatch.apps.models.norm import NormName
from anybatch.apps.progress import make_progress
from anybatch.apps.settings import (
    BatchNormMode,
    LossName,
    OptimizerName,
    RecipeName,
    ScheduleName,
    Settings,
    Task,
    parse_image_size,
)
from anybatch.apps.summary import Interrupted, Summary
from anybatch.apps.train import train as run_training
from anybatch.apps.views import Batch, Loader

MODELS = (
    "cnn[:WIDTH], resnet20, resnet18, resnet34, resnet50, resnet101, unet[:WIDTH], "
    "amoebanet-d[:LAYERS,FILTERS], or package.module:callable"
)

app = typer.Typer(
    help="Any batch size, in the memory you have, with the gradient of the whole batch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

DataOption = Annotated[str, typer.Option("--data", help="digits, or a folder of images.")]
TaskOption = Annotated[Task | None, typer.Option("--task", help="Default: what the folder holds.")]
ModelOption = Annotated[str | None, typer.Option("--model", help=f"One of {MODELS}.")]
RecipeOption = Annotated[
    RecipeName | None,
    typer.Option("--recipe", help="Settings of MBS, section 4.2; explicit options win."),
]
LossOption = Annotated[
    LossName | None,
    typer.Option("--loss", help="Default: cross-entropy for classes, bce+dice for masks."),
]
NormOption = Annotated[NormName, typer.Option("--norm", help="Layer of the built-in models.")]
SizeOption = Annotated[
    str | None, typer.Option("--image-size", help="Resize to N, or WIDTHxHEIGHT, pixels.")
]
CropOption = Annotated[
    int | None, typer.Option("--crop", help="Train on random crops of N x N pixels.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of weights, order and augmentation.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="CPU threads of torch.")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, ... Default: cuda where there is one.")
]
SkipOption = Annotated[
    bool, typer.Option("--skip-corrupt", help="Train without the images that cannot be read.")
]


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
    """Any batch size, in the memory you have, with the gradient of the whole batch."""


@app.command()
def train(
    *,
    data: DataOption = "digits",
    task: TaskOption = None,
    model: ModelOption = None,
    batch_size: Annotated[int, typer.Option(help="Samples of a mini-batch: of one step.")] = 1024,
    micro_batch: Annotated[int, typer.Option(help="Samples on the device at once.")] = 64,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training set.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder. Default: a new one below runs/.")
    ] = None,
    recipe: RecipeOption = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    optimizer: Annotated[OptimizerName | None, typer.Option(help="Default: adamw.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of sgd.")] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="Of the weights, in every step.")
    ] = None,
    schedule: Annotated[
        ScheduleName | None, typer.Option(help="Of the learning rate, over the whole run.")
    ] = None,
    loss: LossOption = None,
    norm: NormOption = "group",
    batchnorm: Annotated[
        BatchNormMode,
        typer.Option(help="exact: of the whole batch; local: of each micro-batch, inexact."),
    ] = "exact",
    image_size: SizeOption = None,
    crop: CropOption = None,
    crops: Annotated[int, typer.Option(help="Random crops of an image in an epoch.")] = 1,
    pad: Annotated[
        int | None, typer.Option(help="Empty pixels around a training image, to crop in.")
    ] = None,
    flip: Annotated[
        bool | None, typer.Option(help="Mirror training images at random. Default: not digits.")
    ] = None,
    seed: SeedOption = 0,
    workers: Annotated[int, typer.Option(help="Processes that read images.")] = 0,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    skip_corrupt: SkipOption = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in --out.")
    ] = False,
) -> None:
    """Train a model with mini-batches of any size, streamed in micro-batches.

    Data: digits (built in); DIR/{train,test}/CLASS/*.png; DIR/CLASS/*.png; or, for segmentation,
    DIR/{image,label}/*.png with masks of 0 and 255. Without a test folder a fifth is held out.
    """
    console = Console()
    with _ending():
        settings = Settings(
            data=data,
            out=out or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S"),
            task=task,
            model=model,
            recipe=recipe,
            batch_size=batch_size,
            micro_batch=micro_batch,
            epochs=epochs,
            lr=lr,
            optimizer=optimizer,
            momentum=momentum,
            weight_decay=weight_decay,
            schedule=schedule,
            loss=loss,
            norm=norm,
            batchnorm=batchnorm,
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
        )
        summary = run_training(settings, make_progress(console))
        console.print(_table(summary))
        if summary.skipped:
            plural = ("file", "was") if summary.skipped == 1 else ("files", "were")
            console.print(
                f"{summary.skipped} {plural[0]} could not be read and {plural[1]} skipped."
            )


@app.command()
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
    """Compare the gradient in micro-batches with that of the whole batch, on real data.

    Exit code 1 when they differ by more than rounding; the report says where, and why.
    """
    with _ending():
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
            parts = build(settings)
            loader = parts.loader(settings, shuffle=True)
            batch = _first_batch(loader, skip_corrupt=skip_corrupt)
            parts.model.train()
            report = check_gradients(parts.model, parts.loss, (batch.inputs, batch.targets))
        typer.echo(str(report))
    if not report.exact:
        raise typer.Exit(1)


def _first_batch(loader: Loader, *, skip_corrupt: bool) -> Batch:
    for batch in loader.epoch(1):
        if batch.unreadable and not skip_corrupt:
            raise corrupt(batch.unreadable)
        if len(batch.inputs):
            return batch
    raise DataError("no sample could be read: all were skipped. Check the files.")


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Turn an error of the person's into one line and an exit code."""
    errors = Console(stderr=True)

    def say(text: str) -> None:
        errors.print(text, markup=False, highlight=False, soft_wrap=True)

    try:
        yield
    except Interrupted as stop:
        summary = stop.summary
        say(
            f"interrupted after step {summary.steps} ({summary.epochs} whole epochs); checkpoint "
            f"and summary are in {summary.run_folder}"
        )
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        say("interrupted before the first step; nothing was trained")
        raise typer.Exit(130) from None
    except AnybatchError as error:
        say(f"error: {error}")
        raise typer.Exit(1) from None


def _table(summary: Summary) -> Table:
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
        "seconds": f"{summary.seconds:.1f}",
        "images/s": f"{summary.images_per_second:,.0f}",
        "run folder": summary.run_folder or "-",
    }
    for row in rows.items():
        table.add_row(*row)
    return table
