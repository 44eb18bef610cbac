"""Names, help texts and defaults of the command's options, and the settings that they make.

typer reads the options of a command from the signature of its function. Commands share many, and an
option must mean the same in all: so `takes` makes the signatures from one table, and the defaults
are those of `Settings`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from anybatch.cli import settings as kinds
from anybatch.cli.allocator import RequestedMode
from anybatch.cli.settings import Settings, parse_image_size

MODELS = (
    "cnn[:WIDTH], resnet20, resnet18, resnet34, resnet50, resnet101, unet[:WIDTH], "
    "amoebanet-d[:LAYERS,FILTERS], or package.module:callable"
)

WORKSPACE = (
    str | None,
    "Workspace of one convolution, to make it faster, such as 64MiB; on the CPU. Default: "
    "convolutions are torch's own.",
)
PLANNED_DEVICE = (
    str | None,
    "cpu, cuda, ...; or cuda:24GiB, a GPU of that size, which need not be there. Default: "
    "cuda where there is one.",
)

OPTIONS: dict[str, Any] = {
    "data": (str, "digits, or a folder of images."),
    "task": (kinds.Task | None, "Default: what the folder holds."),
    "model": (str | None, f"One of {MODELS}."),
    "recipe": (kinds.RecipeName | None, "Settings of MBS, section 4.2; explicit options win."),
    "loss": (kinds.LossName | None, "Default: cross-entropy for classes, bce+dice for masks."),
    "norm": (kinds.NormName, "Layer of the built-in models."),
    "image_size": (str | None, "Resize to N, or WIDTHxHEIGHT, pixels."),
    "crop": (int | None, "Train on random crops of N x N pixels."),
    "offload": (
        kinds.OffloadName,
        "Offload saved tensors: auto if not even one sample fits, or if steps show it to be "
        "faster; to host memory (from a GPU) or a file always; off never.",
    ),
    "states": (
        kinds.StatesName | None,
        "Offload the optimizer's state between its steps: to host memory (from a GPU) or a "
        "file (from the CPU); auto: if nothing fits otherwise. If nothing fits with that, "
        "parameters and gradients are offloaded too, except over ranks and with only "
        "--micro-batch. Default: nothing is offloaded.",
    ),
    "workspace": (
        str | None,
        "Workspace of one convolution, to make it faster, such as 64MiB; on the CPU. auto: a "
        "share of --memory, if a step is faster so. Default: convolutions are torch's own.",
    ),
    "workspace_total": (
        str | None,
        "With --convolutions: workspace of all kernels together, divided for the fastest; only "
        "explained.",
    ),
    "convolutions": (bool, "Explain how each convolution is computed."),
    "policy": (
        kinds.PolicyName,
        "Micro-batches of a convolution: powers of two, all, undivided.",
    ),
    "cache": (Path | None, "File of measurements. Default: one in your cache folder."),
    "seconds": (float, "For measuring, of all kernels together."),
    "processes": (int, "Processes that measure; several are faster and less exact on one CPU."),
    "spill": (str | None, "Folder of these files. Default: the system's for temporary files."),
    "seed": (int, "Of weights, order and augmentation."),
    "threads": (int | None, "CPU threads of torch."),
    "device": (str | None, "cpu, cuda, ... Default: cuda where there is one."),
    "skip_corrupt": (bool, "Train without the images that cannot be read."),
    "batch_size": (int, "Samples of a mini-batch: of one step, of all ranks."),
    "micro_batch": (int | None, "Samples on the device at once. Default: the fastest that fits."),
    "memory": (str | None, "Budget of a step: 64MiB, or 80% of the free memory (default: most)."),
    "epochs": (int | None, "Passes over the training set."),
    "out": (Path | None, "Run folder. Default: a new one below runs/."),
    "lr": (float | None, "Learning rate."),
    "optimizer": (kinds.OptimizerName | None, "Default: adamw."),
    "momentum": (float | None, "Of sgd."),
    "weight_decay": (float | None, "Of the weights, in every step."),
    "schedule": (kinds.ScheduleName | None, "Of the learning rate, over the whole run."),
    "batchnorm": (
        kinds.BatchNormMode,
        "exact: of the full batch; local: of each micro-batch, inexact; adaptive: local until "
        "the training loss no longer falls, then exact.",
    ),
    "max_batch": (
        int | None,
        "With --batchnorm adaptive: local for mini-batches of so many samples.",
    ),
    "crops": (int, "Random crops of an image in an epoch."),
    "pad": (int | None, "Empty pixels around a training image, to crop in."),
    "flip": (bool | None, "Mirror training images at random. Default: not digits."),
    "workers": (int, "Processes that read images."),
    "overwrite": (bool, "Replace the run in --out."),
    "resume": (Path | None, "Resume the run in this folder, from its last checkpoint."),
    "replan": (bool, "With --resume: plan anew, for another --memory too."),
    "compare": (bool, "Train with and without anybatch under --memory, and write nothing."),
    "compare_steps": (int, "Steps of --compare, at most."),
    "gpus": (int | None, "Estimate the gain by so many GPUs; measures."),
    "speedup": (float | None, "Find the number of GPUs for such a speedup; measures."),
    "deadline": (str | None, 'Number of GPUs to train all epochs in "6h"; measures.'),
    "network": (str | None, 'Between GPUs, such as "10Gbit"; default: sums cost nothing.'),
    "servers": (str | None, 'Parameter servers of --gpus workers: a number, or "auto".'),
    "measure": (bool, "Time the sizes that fit, and choose the fastest."),
    "forget": (bool, "Forget the plans of all earlier starts, and end."),
    "timeline": (bool, "Draw live bytes by owner against the budget."),
    "json": (bool, "Print the plan as JSON, and only that."),
    "html": Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE.html",
            help="Explain the plan as a page, in this file; without it a plan writes nothing.",
        ),
    ],
    "checkpoint_minutes": (float, "Between two checkpoints within an epoch; 0: after every step."),
    "malloc": (RequestedMode, "Freed host memory: fast retains it, tight returns it."),
}
"""Of each parameter its type and help, or a parameter of typer's that differs from these."""

DEFAULTS: dict[str, Any] = {
    **{field.name: field.default for field in dataclasses.fields(Settings)},
    "compare_steps": 20,
    "malloc": "auto",
    "policy": "powerOfTwo",
    "processes": 1,
    "seconds": 600.0,
}
"""Of options that are neither flags nor None by default."""

Command = Callable[[typer.Context, SimpleNamespace], None]
"""A command: its context, and the values of its options by name."""


def takes(names: str, /, **others: Any) -> Callable[[Command], Callable[..., None]]:
    """Give a command its options, in this order.

    `names`: of the options, between blanks. `others`: those that `OPTIONS` has not, or not as this
    command has them: type, help and default, which may be left out.
    """

    def parameter(name: str) -> Parameter:
        made = others.get(name, OPTIONS.get(name))
        default = DEFAULTS.get(name)
        if isinstance(made, tuple):
            type_, words, *own = made
            flag = ["--" + name.replace("_", "-")] if type_ is bool else []  # and no --no-flag
            made = Annotated[type_, typer.Option(*flag, help=words)]
            default = own[0] if own else DEFAULTS.get(name, False if flag else None)
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=made)

    def decorate(command: Command) -> Callable[..., None]:
        @wraps(command)
        def called(context: typer.Context, **values: Any) -> None:
            command(context, SimpleNamespace(**values))

        first = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
        options = [parameter(name) for name in names.split()]
        called.__signature__ = Signature([first, *options])  # type: ignore[attr-defined]
        called.__annotations__ = {"context": typer.Context}
        return called

    return decorate


def settings_of(options: SimpleNamespace, **others: Any) -> Settings:
    """Return the settings that options of a command make.

    `options`: the values of its options. `others`: fields that have other values.
    """
    names = {field.name for field in dataclasses.fields(Settings)}
    found = {name: value for name, value in vars(options).items() if name in names} | others
    size = found.get("image_size")
    return Settings(**found | {"image_size": None if size is None else parse_image_size(size)})
