"""Names and help texts of the command's options, one type for each.

typer reads an option's name and help from its parameter's type. `train` and `check` share many, and
an option must mean the same in both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anybatch.cli.allocator import RequestedMode
from anybatch.cli.models.norm import NormName
from anybatch.cli.settings import (
    BatchNormMode,
    LossName,
    OffloadName,
    OptimizerName,
    PolicyName,
    RecipeName,
    ScheduleName,
    StatesName,
    Task,
)

MODELS = (
    "cnn[:WIDTH], resnet20, resnet18, resnet34, resnet50, resnet101, unet[:WIDTH], "
    "amoebanet-d[:LAYERS,FILTERS], or package.module:callable"
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
OffloadOption = Annotated[
    OffloadName,
    typer.Option(
        help="Offload saved tensors: auto if not even one sample fits, or if it was timed to be "
        "faster; to host memory (from a GPU) or a file always; off never."
    ),
]
StatesOption = Annotated[
    StatesName | None,
    typer.Option(
        help="Offload the optimizer's state between its steps: to host memory (from a GPU) or a "
        "file (from the CPU); auto: if nothing fits otherwise. If nothing fits with that, "
        "parameters and gradients are offloaded too, except over ranks and with only "
        "--micro-batch. Default: nothing is offloaded."
    ),
]
WorkspaceOption = Annotated[
    str | None,
    typer.Option(
        help="Workspace of one convolution, to make it faster, such as 64MiB; on the CPU. "
        "Default: convolutions are torch's own."
    ),
]
SharedOption = Annotated[
    str | None,
    typer.Option(
        "--workspace",
        help="Workspace of one convolution, to make it faster, such as 64MiB; on the CPU. auto: "
        "a share of --memory, if a step is faster so. Default: convolutions are torch's own.",
    ),
]
TotalOption = Annotated[
    str | None,
    typer.Option(
        "--workspace-total",
        help="With --convolutions: workspace of all kernels together, divided for the fastest; "
        "only explained.",
    ),
]
ConvolutionsOption = Annotated[
    bool,
    typer.Option(
        "--convolutions",
        help="Explain how each convolution is computed; FILE.png for the effect of a workspace.",
    ),
]
BenchOption = Annotated[
    bool, typer.Option("--convolutions", help="Measure the convolutions of a model.")
]
PolicyOption = Annotated[
    PolicyName,
    typer.Option(help="Micro-batches of a convolution: powers of two, all, or undivided."),
]
CacheOption = Annotated[
    Path | None,
    typer.Option("--cache", help="File of measurements. Default: one in your cache folder."),
]
SecondsOption = Annotated[float, typer.Option(help="For measuring, of all kernels together.")]
ProcessesOption = Annotated[
    int,
    typer.Option(help="Processes that measure; several are faster and less exact on one CPU."),
]
SpillOption = Annotated[
    str | None,
    typer.Option(help="Folder of these files. Default: the system's for temporary files."),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of weights, order and augmentation.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="CPU threads of torch.")]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, ... Default: cuda where there is one.")
]
PlannedDeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="cpu, cuda, ...; or cuda:24GiB, a GPU of that size, which need not be there. "
        "Default: cuda where there is one.",
    ),
]
SkipOption = Annotated[
    bool, typer.Option("--skip-corrupt", help="Train without the images that cannot be read.")
]
BatchSizeOption = Annotated[
    int, typer.Option(help="Samples of a mini-batch: of one step, of all ranks.")
]
MicroBatchOption = Annotated[
    int | None,
    typer.Option(help="Samples on the device at once. Default: the fastest that fits."),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help="Budget of a step, such as 64MiB. Default: the device's free memory.",
    ),
]
EpochsOption = Annotated[int | None, typer.Option(help="Passes over the training set.")]
OutOption = Annotated[Path | None, typer.Option(help="Run folder. Default: a new one below runs/.")]
LrOption = Annotated[float | None, typer.Option(help="Learning rate.")]
OptimizerOption = Annotated[OptimizerName | None, typer.Option(help="Default: adamw.")]
MomentumOption = Annotated[float | None, typer.Option(help="Of sgd.")]
DecayOption = Annotated[float | None, typer.Option(help="Of the weights, in every step.")]
ScheduleOption = Annotated[
    ScheduleName | None, typer.Option(help="Of the learning rate, over the whole run.")
]
BatchNormOption = Annotated[
    BatchNormMode,
    typer.Option(
        help="exact: of the full batch; local: of each micro-batch, inexact; adaptive: local "
        "until the training loss no longer falls, then exact."
    ),
]
MaxBatchOption = Annotated[
    int | None,
    typer.Option(help="With --batchnorm adaptive: local for mini-batches of so many samples."),
]
CropsOption = Annotated[int, typer.Option(help="Random crops of an image in an epoch.")]
PadOption = Annotated[
    int | None, typer.Option(help="Empty pixels around a training image, to crop in.")
]
FlipOption = Annotated[
    bool | None, typer.Option(help="Mirror training images at random. Default: not digits.")
]
WorkersOption = Annotated[int, typer.Option(help="Processes that read images.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")]
ResumeOption = Annotated[
    Path | None,
    typer.Option(help="Resume the run in this folder, from its last checkpoint."),
]
ReplanOption = Annotated[
    bool,
    typer.Option("--replan", help="With --resume: plan anew, for another --memory too."),
]
CompareOption = Annotated[
    bool,
    typer.Option(
        "--compare", help="Train with and without anybatch under --memory, and write nothing."
    ),
]
CompareStepsOption = Annotated[int, typer.Option(help="Steps of --compare, at most.")]
GpusOption = Annotated[
    int | None, typer.Option("--gpus", help="Estimate the gain by so many GPUs; measures.")
]
SpeedupOption = Annotated[
    float | None,
    typer.Option("--speedup", help="Find the number of GPUs for such a speedup; measures."),
]
DeadlineOption = Annotated[
    str | None,
    typer.Option("--deadline", help='Number of GPUs to train all epochs in "6h"; measures.'),
]
NetworkOption = Annotated[
    str | None,
    typer.Option("--network", help='Between GPUs, such as "10Gbit"; default: sums cost nothing.'),
]
ServersOption = Annotated[
    str | None,
    typer.Option("--servers", help='Parameter servers of --gpus workers: a number, or "auto".'),
]
MeasureOption = Annotated[
    bool, typer.Option("--measure", help="Time the sizes that fit, and choose the fastest.")
]
TimelineOption = Annotated[
    bool,
    typer.Option(
        "--timeline", help="Draw live bytes by owner against the budget; FILE.png for a picture."
    ),
]
PictureArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE.png]", show_default=False, help="A picture of that."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the plan as JSON, and only that.")]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE.html",
        help="Explain the plan as a page, in this file; without it a plan writes nothing.",
    ),
]
MinutesOption = Annotated[
    float, typer.Option(help="Between two checkpoints within an epoch; 0: after every step.")
]
MallocOption = Annotated[
    RequestedMode,
    typer.Option(help="Freed host memory: fast retains it, tight returns it."),
]
