"""From settings to the parts of a run: views, model, loss, optimizer. Used by train and check."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR

from anybatch import Adaptive, Loss, Plateau
from anybatch.cli import allocator
from anybatch.cli.data import Data, open_data
from anybatch.cli.devices import find_device
from anybatch.cli.faults import SettingsError, as_setting
from anybatch.cli.metrics import make_loss
from anybatch.cli.models.find import find_model
from anybatch.cli.saved_run import versions
from anybatch.cli.settings import (
    AUTO,
    Settings,
    TrainingRecipe,
    choose,
    chosen_image_size,
    lr_factor,
)
from anybatch.cli.team import SINGLE_PROCESS, Team
from anybatch.cli.views import Loader, Share, Views, make_views
from anybatch.devices import absent, forked_rng
from anybatch.kernels import kernel_devices
from anybatch.planning import require_states


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Parts of a run: recipe, data, views, loss, and the model on its device."""

    recipe: TrainingRecipe
    data: Data
    train: Views
    test: Views
    model: nn.Module
    loss: Callable[..., Tensor] | Loss
    device: torch.device

    def loader(self, settings: Settings, *, shuffle: bool, team: Team = SINGLE_PROCESS) -> Loader:
        """Return the mini-batches of the training views, shuffled, or of the test views."""
        return Loader(
            self.train if shuffle else self.test,
            settings.batch_size,
            seed=settings.seed,
            shuffle=shuffle,
            workers=settings.workers,
            share=Share(team.rank, team.size),
        )


def build(settings: Settings, team: Team = SINGLE_PROCESS) -> RunParts:
    """Open the data and make everything that `settings` name, for one rank of the `team`.

    Raises:
        AnybatchError: one of the command's errors, when something does not fit together.
    """
    settings.checked()
    device = find_device(team.device(settings.device))
    with as_setting():
        require_states(settings.states, device)
    if settings.workspace is not None and device.type not in kernel_devices():
        raise SettingsError(
            f"workspace is for convolutions on {' and '.join(kernel_devices())}; the device is "
            f"{device.type}. Leave it out."
        )
    if settings.workspace == AUTO and team.several:
        raise SettingsError(
            "workspace must be bytes where several processes share each mini-batch, since their "
            "clocks differ; got auto. Name it, such as --workspace 64MiB."
        )
    data = open_data(settings, chosen_image_size(settings))
    recipe = choose(settings, data.task)
    loss = make_loss(recipe.loss, data.task)
    flip = settings.data != "digits" if settings.flip is None else settings.flip
    train, test = make_views(
        data, crop=recipe.crop, crops=settings.crops, pad=recipe.pad, flip=flip, seed=settings.seed
    )
    model = find_model(
        recipe.model,
        num_classes=data.num_classes,
        in_channels=data.in_channels,
        image_size=train.crop,
        norm=settings.norm,
    )
    return RunParts(
        recipe=recipe,
        data=data,
        train=train,
        test=test,
        model=model.to(device),
        loss=loss,
        device=device,
    )


def describe(settings: Settings, parts: RunParts, team: Team = SINGLE_PROCESS) -> dict[str, Any]:
    """Return the contents of config.json: all settings, and all decisions that follow from them."""
    data = parts.data
    return {
        "settings": {
            **dataclasses.asdict(settings),
            "out": None if settings.out is None else str(settings.out),
        },
        "recipe": dataclasses.asdict(parts.recipe),
        "data": {
            "task": data.task,
            "num_classes": data.num_classes,
            "in_channels": data.in_channels,
            "size": data.size,
            "crop": parts.train.crop,
            "mean": data.mean,
            "std": data.std,
            "train_samples": len(data.train),
            "test_samples": len(data.test),
            "test_views": len(parts.test),
            "notes": data.notes,
        },
        "process": {
            "threads": torch.get_num_threads(),
            "device": str(parts.device) if absent() is None else f"{settings.device}, not there",
            "malloc": allocator.running(os.environ),
            **({"ranks": team.size} if team.several else {}),
        },
        "versions": versions(),
    }


def circumstances(settings: Settings, parts: RunParts, team: Team) -> dict[str, Any]:
    """Return the entries of a run's summary on its settings, parts and process."""
    return {
        "batch_size": settings.batch_size,
        "model": parts.recipe.model,
        "parameters": sum(parameter.numel() for parameter in parts.model.parameters()),
        "train_samples": len(parts.data.train),
        "test_samples": len(parts.data.test),
        "seed": settings.seed,
        "threads": torch.get_num_threads(),
        "device": str(parts.device),
        "malloc": allocator.running(os.environ),
        "versions": versions(),
        "ranks": team.size,
        "run_folder": None if settings.out is None else str(settings.out),
    }


@contextlib.contextmanager
def seeded(seed: int, threads: int | None) -> Iterator[None]:
    """Run a block with all generators at `seed` and `threads` threads; put both back after.

    The generators are torch's, and the global ones of Python and numpy, which a model may use.
    """
    before = torch.get_num_threads()
    python, numpy = random.getstate(), np.random.get_state()
    with forked_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
            random.setstate(python)
            np.random.set_state(numpy)


# BatchNorm of a run: exact (full batch), local (micro-batch), or adaptive (local, then exact).
#
# With `--batchnorm adaptive` a run begins with the statistics of each micro-batch, which cost
# nothing, and continues with those of the full batch once its training loss no longer falls. The
# policy is `anybatch.Adaptive`; the command passes it an epoch's training loss, reports its change,
# and stores its state in the checkpoint.
#
# Source: AGBN, section 4.3: BZ_max and IsConverged.


class BatchNormPolicy:
    """BatchNorm policy of a run with mini-batches of `batch_size` samples, except the last.

    `batchnorm`: the argument `batchnorm` of an engine. `exact_from`: the first epoch (from 1) after
    training had converged; None before.
    """

    def __init__(self, settings: Settings, batch_size: int) -> None:
        self._until = Plateau()
        self._adaptive = Adaptive(max_batch=settings.max_batch, criterion=self._until)
        by_hand = {**self._adaptive.state_dict(), "by_hand": True}
        self._adaptive.load_state_dict(by_hand)  # an epoch's loss counts, and no step's
        self.batchnorm = self._adaptive if settings.batchnorm == "adaptive" else settings.batchnorm
        self.exact_from: int | None = None
        self._batch_size = batch_size

    def choose(self, batch_size: int) -> None:
        """Choose for a mini-batch that is to be planned."""
        self._adaptive.choose(batch_size)

    def measured(self, epoch: int, loss: float) -> str | None:
        """Record the training loss of an epoch; return the change from the next on, or None."""
        if self.batchnorm is not self._adaptive:
            return None
        before = self._adaptive.is_converged
        self._adaptive.measured(loss)
        if before or not self._adaptive.is_converged:
            return None
        self.exact_from = epoch + 1
        change = f"BatchNorm is exact from epoch {self.exact_from} on"
        most = self._adaptive.max_batch
        if most is not None and self._batch_size >= most:
            change = f"BatchNorm stays local where a mini-batch has {most} samples or more"
        return (
            f"{change}: the training loss has not fallen by {self._until.least:.0%} for "
            f"{self._until.patience} epochs"
        ).replace("%", " %")

    def state(self) -> dict[str, Any] | None:
        """Return the state that a resumed run needs; None where nothing changes."""
        if self.batchnorm is not self._adaptive:
            return None
        return {**self._adaptive.state_dict(), "exact_from": self.exact_from}

    def put_back(self, state: dict[str, Any] | None) -> None:
        """Restore the state that `state` returned."""
        if state is not None and self.batchnorm is self._adaptive:
            self._adaptive.load_state_dict(state)
            self.exact_from = state["exact_from"]


def make_optimizer(recipe: TrainingRecipe, parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    """Return torch's optimizer with the recipe's numbers."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    lr, decay = recipe.lr, recipe.weight_decay
    if recipe.optimizer == "sgd":
        return optim.SGD(trained, lr=lr, momentum=recipe.momentum, weight_decay=decay)
    make = optim.Adam if recipe.optimizer == "adam" else optim.AdamW
    return make(trained, lr=lr, weight_decay=decay)


def make_schedule(recipe: TrainingRecipe, optimizer: optim.Optimizer, steps: int) -> LambdaLR:
    """Return a schedule to be stepped once after each of the run's `steps` optimizer steps."""
    return LambdaLR(optimizer, functools.partial(lr_factor, recipe.schedule, steps))
