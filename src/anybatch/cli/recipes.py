"""Recipes: which optimizer, schedule and loss a run uses; and the optimizer and the schedule.

An explicit option wins over the named recipe, and the recipe over the default of the task. torch
has the optimizers; only their numbers are decided here. The three recipes of MBS are its section
4.2.4; the image sizes of its classification runs (224, 416) are left to the user.

Source: MBS, section 4.2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR

from anybatch.cli.faults import SettingsError
from anybatch.cli.settings import LossName, OptimizerName, ScheduleName, Settings


@dataclass(frozen=True, kw_only=True)
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


DIGITS = TrainingRecipe(
    model="cnn",
    epochs=60,
    optimizer="adamw",
    lr=2e-3,
    momentum=0.9,
    weight_decay=1e-2,
    schedule="cosine",
    loss="cross-entropy",
)
CLASSIFICATION = dataclasses.replace(
    DIGITS, model="resnet20", epochs=30, lr=3e-3, weight_decay=5e-2
)
SEGMENTATION = dataclasses.replace(
    CLASSIFICATION, model="unet:16", loss="bce+dice", weight_decay=1e-2
)
MBS_RESNET = TrainingRecipe(
    model="resnet50",
    epochs=30,
    optimizer="sgd",
    lr=0.01,
    momentum=0.9,
    weight_decay=5e-4,
    schedule="constant",
    loss="cross-entropy",
)
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


def make_optimizer(recipe: TrainingRecipe, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Return torch's optimizer with the recipe's numbers."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    lr, decay = recipe.lr, recipe.weight_decay
    if recipe.optimizer == "sgd":
        return optim.SGD(trained, lr=lr, momentum=recipe.momentum, weight_decay=decay)
    if recipe.optimizer == "adam":
        return optim.Adam(trained, lr=lr, weight_decay=decay)
    return optim.AdamW(trained, lr=lr, weight_decay=decay)


def lr_factor(schedule: str, steps: int, step: int) -> float:
    """Return the factor of the learning rate in `step` (from 0) of `steps`.

    "linear" falls from 1 towards 0, "cosine" as half a cosine wave, "constant" is 1.
    """
    done = min(1.0, step / steps)
    if schedule == "linear":
        return 1 - done
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1.0


def make_schedule(recipe: TrainingRecipe, optimizer: optim.Optimizer, steps: int) -> LambdaLR:
    """Return a schedule to be stepped once after each of the run's `steps` optimizer steps."""
    return LambdaLR(optimizer, functools.partial(lr_factor, recipe.schedule, steps))
