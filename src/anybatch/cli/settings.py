"""Settings of a training run as one frozen value, checked before anything is read.

argparse and typer check one option at a time. Here all faults are gathered and said together, and
the same value serves the command and a program that calls `train` directly.

A field that is None is filled by the recipe, else by the task's default (`recipes.choose`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from anybatch.cli.faults import SettingsError
from anybatch.cli.models.norm import NormName
from anybatch.planning import spill_of
from anybatch.units import parse_bytes

Task = Literal["classification", "segmentation"]
AUTO = "auto"
"""The workspace, or the place of the optimizer's state, that a plan chooses."""
OptimizerName = Literal["sgd", "adam", "adamw"]
ScheduleName = Literal["constant", "linear", "cosine"]
BatchNormMode = Literal["exact", "local", "adaptive"]
LossName = Literal["cross-entropy", "bce", "bce+dice", "bce+dice-per-image"]
OffloadName = Literal["auto", "off", "host", "file"]
StatesName = Literal["host", "file", "auto"]
PolicyName = Literal["powerOfTwo", "all", "undivided"]
RecipeName = Literal["mbs-resnet", "mbs-amoebanet", "mbs-unet"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Model, data, options and output folder of a training run.

    `data` is "digits" or a folder. `out=None` writes nothing. `image_size` (height, width), `crop`
    and `pad` are pixels; an epoch takes `crops` random crops of each training image. `batch_size`
    and `micro_batch` count samples. `flip=None` mirrors training images of folders at random but
    not digits. `device=None` is CUDA where there is one. Within an epoch a checkpoint is written
    when the last one is `checkpoint_minutes` old; 0 is after every step.

    `memory` is the budget of a step, in bytes or as "64MiB"; None is the free memory of the device.
    With `micro_batch=None` the size is planned. Both: the size is fixed, and checked against
    memory. A `micro_batch` alone plans nothing. Where several ranks train, `batch_size` is that of
    all of them, and `memory` that of each.

    `offload`, `states` and `spill` are as for `anybatch.plan`: the stores of offloaded saved
    tensors, and of the optimizer's state between its steps. With a plan, parameters and gradients
    are offloaded too if nothing fits otherwise; "auto" offloads the state only if needed.

    `workspace` is the limit of what one convolution may allocate to be faster, as for
    `anybatch.plan`; "auto" shares the memory with them.

    `max_batch` is for `batchnorm="adaptive"`: a mini-batch of so many samples is normalised
    locally.

    Raises:
        SettingsError: by `checked()`, naming every field that makes no sense.
    """

    data: str = "digits"
    out: Path | None = None
    task: Task | None = None
    model: str | None = None
    recipe: RecipeName | None = None
    batch_size: int = 1024
    micro_batch: int | None = None
    memory: str | int | None = None
    offload: OffloadName = "auto"
    states: StatesName | None = None
    spill: str | None = None
    workspace: str | int | None = None
    epochs: int | None = None
    lr: float | None = None
    optimizer: OptimizerName | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    schedule: ScheduleName | None = None
    loss: LossName | None = None
    norm: NormName = "group"
    batchnorm: BatchNormMode = "exact"
    max_batch: int | None = None
    image_size: tuple[int, int] | None = None
    crop: int | None = None
    crops: int = 1
    pad: int | None = None
    flip: bool | None = None
    seed: int = 0
    workers: int = 0
    threads: int | None = None
    device: str | None = None
    skip_corrupt: bool = False
    overwrite: bool = False
    checkpoint_minutes: float = 10.0

    def checked(self) -> Settings:
        """Return these settings, or say in one error everything that is wrong with them."""
        faults = [*self._wrong_choices(), *self._wrong_numbers(), *self._wrong_memory()]
        if faults:
            raise SettingsError("; ".join(faults) + ".")
        return self

    @property
    def planned(self) -> bool:
        """Whether there is anything to plan: a size, a budget, or the workspace of convolutions."""
        requested = self.memory, self.workspace
        return self.micro_batch is None or any(one is not None for one in requested)

    def _wrong_memory(self) -> list[str]:
        try:
            if self.memory is not None:
                parse_bytes(self.memory)
            if self.workspace not in (None, AUTO):
                parse_bytes(self.workspace, "workspace", word=AUTO)
            if self.offload in get_args(OffloadName):
                spill_of(self.offload, self.spill)
        except ValueError as error:
            return [str(error)]
        spills = self.spill is not None and self.states is None
        if not self.planned and (self.offload in ("host", "file") or spills):
            return ["offload and spill need a budget to keep to; memory was not given"]
        if self.memory is None and self.micro_batch is not None:
            autos = {"workspace": self.workspace, "states": self.states}
            return [
                f"memory must be given for {name} auto beside a micro-batch, since there is no "
                "budget else; it was not"
                for name, value in autos.items()
                if value == AUTO
            ]
        return []

    def _wrong_choices(self) -> list[str]:
        choices = {
            "task": (self.task, Task),
            "recipe": (self.recipe, RecipeName),
            "optimizer": (self.optimizer, OptimizerName),
            "schedule": (self.schedule, ScheduleName),
            "loss": (self.loss, LossName),
            "norm": (self.norm, NormName),
            "batchnorm": (self.batchnorm, BatchNormMode),
            "offload": (self.offload, OffloadName),
            "states": (self.states, StatesName),
        }
        return [
            f"{name} must be one of {', '.join(get_args(literal))}; got {value!r}"
            for name, (value, literal) in choices.items()
            if value is not None and value not in get_args(literal)
        ]

    def _wrong_numbers(self) -> list[str]:
        height, width = self.image_size or (None, None)
        at_least_1 = [
            *(("batch-size", self.batch_size), ("micro-batch", self.micro_batch)),
            *(("epochs", self.epochs), ("threads", self.threads), ("crop", self.crop)),
            *(("crops", self.crops), ("max-batch", self.max_batch)),
            *(("image-size", height), ("image-size", width)),
        ]
        not_negative = [
            *(("lr", self.lr), ("momentum", self.momentum), ("weight-decay", self.weight_decay)),
            *(("pad", self.pad), ("seed", self.seed), ("workers", self.workers)),
            ("checkpoint-minutes", self.checkpoint_minutes),
        ]
        faults = [
            f"{name} must be at least 1; got {value}"
            for name, value in at_least_1
            if value is not None and value < 1
        ]
        faults += [
            f"{name} must not be negative; got {value}"
            for name, value in not_negative
            if value is not None and not value >= 0
        ]
        if self.momentum is not None and self.momentum >= 1:
            faults.append(f"momentum must be below 1; got {self.momentum}")
        if self.max_batch is not None and self.batchnorm != "adaptive":
            faults.append(f"max-batch is for batchnorm adaptive; batchnorm is {self.batchnorm}")
        return faults


def parse_image_size(text: str) -> tuple[int, int]:
    """Return (height, width) of "224" or of "WIDTHxHEIGHT" such as "959x640".

    Raises:
        SettingsError: for any other text.
    """
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise SettingsError(
            f"image-size must be a number of pixels or WIDTHxHEIGHT, such as 224 or 959x640; "
            f"got {text!r}."
        )
    return int(parts[-1]), int(parts[0])
