"""Settings of a training run as one frozen value, checked before anything is read.

argparse and typer check one option at a time. Here all faults are gathered and said together, and
the same value serves the command and a program that calls `train` directly.

A field that is None is filled by the recipe, else by the task's default (`choose`).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import anybatch
from anybatch.cli.faults import SettingsError
from anybatch.units import parse_bytes, parse_share

Task = Literal["classification", "segmentation"]
AUTO = "auto"
"""The workspace, or the place of the optimizer's state, that a plan chooses."""
OptimizerName = Literal["sgd", "adam", "adamw"]
ScheduleName = Literal["constant", "linear", "cosine"]
BatchNormMode = Literal["exact", "local", "adaptive"]
NormName = Literal["group", "batch"]
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
            if self.memory is not None and parse_share(self.memory) is None:
                parse_bytes(self.memory, word="80%")
            if self.workspace not in (None, AUTO):
                parse_bytes(self.workspace, "workspace", word=AUTO)
            if self.offload in get_args(OffloadName):
                anybatch.planning.spill_of(self.offload, self.spill)
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
        faults = []
        for name, hint in get_type_hints(Settings).items():
            inner, value = (hint, *get_args(hint)), getattr(self, name)
            choices = [one for part in inner for one in get_args(part) if isinstance(one, str)]
            if choices and value is not None and value not in choices:
                faults.append(f"{name} must be one of {', '.join(choices)}; got {value!r}")
        return faults

    def _named(self, names: str) -> list[tuple[str, Any]]:
        return [(name.replace("_", "-"), getattr(self, name)) for name in names.split()]

    def _wrong_numbers(self) -> list[str]:
        sides = [("image-size", side) for side in self.image_size or ()]
        counts = self._named("batch_size micro_batch epochs threads crop crops max_batch")
        not_negative = self._named("lr momentum weight_decay pad seed workers checkpoint_minutes")
        faults = [
            f"{name} must be at least 1; got {value}"
            for name, value in counts + sides
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


# Recipes: which optimizer, schedule and loss a run uses; and the optimizer and the schedule.
#
# An explicit option wins over the named recipe, and the recipe over the default of the task. torch
# has the optimizers; only their numbers are decided here. The three recipes of MBS are its section
# 4.2.4; the image sizes of its classification runs (224, 416) are left to the user.
#
# Source: MBS, section 4.2.


@dataclass(frozen=True)
class TrainingRecipe:
    """A complete recipe: nothing in it is left to be chosen but the size of the images."""

    model: str
    epochs: int
    optimizer: OptimizerName
    lr: float
    momentum: float
    weight_decay: float
    schedule: ScheduleName
    loss: LossName
    image_size: tuple[int, int] | None = None
    crop: int | None = None
    pad: int = 0


DIGITS = TrainingRecipe("cnn", 60, "adamw", 2e-3, 0.9, 1e-2, "cosine", "cross-entropy")
CLASSIFICATION = dataclasses.replace(
    DIGITS, model="resnet20", epochs=30, lr=3e-3, weight_decay=5e-2
)
SEGMENTATION = dataclasses.replace(
    CLASSIFICATION, model="unet:16", loss="bce+dice", weight_decay=1e-2
)
MBS_RESNET = TrainingRecipe("resnet50", 30, "sgd", 0.01, 0.9, 5e-4, "constant", "cross-entropy")
RECIPES = {
    "mbs-resnet": MBS_RESNET,
    "mbs-amoebanet": dataclasses.replace(
        MBS_RESNET, model="amoebanet-d:6,190", lr=0.1, weight_decay=1e-4, schedule="linear"
    ),
    "mbs-unet": dataclasses.replace(
        MBS_RESNET,
        model="unet:64",
        optimizer="adam",
        loss="bce+dice",
        image_size=(640, 959),
        crop=384,
    ),
}
SGD_LR, ADAM_LR = 0.05, 3e-3  # when only the optimizer was named


def choose(settings: Settings, task: str) -> TrainingRecipe:
    """Return the recipe of a run: from `settings`, then its recipe, then the task's default.

    Raises:
        SettingsError: when the recipe or the loss is for the other task, or momentum is given for
            an optimizer without it.
    """
    base = SEGMENTATION if task == "segmentation" else CLASSIFICATION
    if settings.data == "digits":
        base = DIGITS
    if settings.recipe is not None:
        base = RECIPES[settings.recipe]
        if (base.loss != "cross-entropy") != (task == "segmentation"):
            raise SettingsError(f"recipe {settings.recipe} is not for {task}; choose another.")
    if settings.optimizer not in (None, base.optimizer):
        lr = SGD_LR if settings.optimizer == "sgd" else ADAM_LR
        base = dataclasses.replace(base, lr=lr)
    names = [field.name for field in dataclasses.fields(TrainingRecipe)]
    requested = {name: getattr(settings, name) for name in names}
    recipe = dataclasses.replace(base, **{k: v for k, v in requested.items() if v is not None})
    if settings.momentum is not None and recipe.optimizer != "sgd":
        raise SettingsError(
            f"momentum is for the optimizer sgd; got {recipe.optimizer}. Leave --momentum out."
        )
    return recipe


def chosen_image_size(settings: Settings) -> tuple[int, int] | None:
    """Return the (height, width) that images are resized to, as fixed before the data is opened."""
    if settings.image_size is not None or settings.recipe is None:
        return settings.image_size
    return RECIPES[settings.recipe].image_size


def lr_factor(schedule: str, steps: int, step: int) -> float:
    """Return the factor of the learning rate in `step` (from 0) of `steps`.

    "linear" falls from 1 towards 0, "cosine" as half a cosine wave, "constant" is 1.
    """
    done = min(1.0, step / steps)
    if schedule == "linear":
        return 1 - done
    return 0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1.0
