"""From settings to the parts of a run: views, model, loss, optimizer. Used by train and check."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anybatch import Loss
from anybatch.cli import allocator
from anybatch.cli.data import Data, open_data
from anybatch.cli.devices import find_device
from anybatch.cli.faults import SettingsError
from anybatch.cli.losses import make_loss
from anybatch.cli.models.find import find_model
from anybatch.cli.recipes import TrainingRecipe, choose, chosen_image_size
from anybatch.cli.settings import AUTO, Settings
from anybatch.cli.summary import versions
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
    try:
        require_states(settings.states, device)
    except ValueError as error:
        raise SettingsError(f"{error}.") from error
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
