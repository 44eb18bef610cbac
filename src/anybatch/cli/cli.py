"""The command `anybatch`: train, plan, why, check, profile, bench and report.

typer reads the options. The code of a command is imported when it runs: torch takes a second, which
help, the version and a wrong option need not wait for (test_help_needs_no_torch).
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from anybatch.cli.options import PLANNED_DEVICE, WORKSPACE, takes

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
    from anybatch.cli import train

    train.command(context, options)


@app.command()
@takes(
    "data task model batch_size memory micro_batch offload states spill workspace "
    "measure forget gpus speedup deadline network servers timeline convolutions workspace_total "
    "cache json html recipe optimizer momentum loss norm batchnorm max_batch image_size crop "
    "seed threads device malloc skip_corrupt",
    device=PLANNED_DEVICE,
)
def plan(context: typer.Context, options: SimpleNamespace) -> None:
    """Explain a step's plan, memory and time, as a database explains a query; train nothing.

    The plan is that of `train` for the first mini-batch of the training data; with --batchnorm
    adaptive, that of the epochs before BatchNorm becomes exact.
    """
    from anybatch.cli import explain

    explain.plan(context, options)


@app.command()
@takes(
    "data task model batch_size memory micro_batch states recipe optimizer momentum loss norm "
    "batchnorm max_batch image_size crop seed threads device skip_corrupt"
)
def why(context: typer.Context, options: SimpleNamespace) -> None:
    """Compare ways to hold less: checkpointing, chunks, tiles, offloading; train nothing.

    The bytes of each are by dry runs; the last line says which way the plan has, and why.
    """
    from anybatch.cli import explain

    explain.why(context, options)


@app.command()
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
    from anybatch.cli import profiled

    profiled.profile(context, options)


@app.command()
@takes(
    "convolutions data task model batch_size micro_batch workspace policy cache seconds "
    "processes recipe loss norm image_size crop seed threads device malloc skip_corrupt",
    convolutions=(bool, "Measure the convolutions of a model."),
    workspace=(*WORKSPACE, "64MiB"),
)
def bench(context: typer.Context, options: SimpleNamespace) -> None:
    """Measure a model's convolutions on this machine, and store the times for later processes.

    With --convolutions: every convolution of the model on --micro-batch samples, forward and
    backward, by all algorithms that --workspace allows. Ctrl-C keeps the measurements so far.
    """
    from anybatch.cli import bench

    bench.bench(context, options)


@app.command()
@takes(
    "data task model batch_size recipe loss norm image_size crop seed threads device skip_corrupt",
    batch_size=(int, "Samples of the batch that is checked.", 8),
)
def check(context: typer.Context, options: SimpleNamespace) -> None:
    """Compare the gradient in micro-batches with that of the full batch, on real data.

    Exit code 1 when they differ by more than rounding; the report says where, and why.
    """
    from anybatch.cli import explain

    explain.check(context, options)


@app.command()
def report(
    run_folder: Annotated[Path, typer.Argument(help="Of a training, ended or going on.")],
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Default: report.html in the run folder."),
    ] = None,
) -> None:
    """Write the page about a training anew: curves, throughput, memory, and the plan explained.

    It is one file that needs no network and no other file.
    """
    from anybatch.cli.report import write

    write.report(run_folder, out)
