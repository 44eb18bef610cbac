"""Accumulation that is set in any way, at any time: one batch of all of it, or a refusal.

The truth is a loop of torch alone over batches of 16 rows, the last of one: a Trainer that sums
the means of four small batches is wrong on it, as rows have uneven counts of labels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

transformers = pytest.importorskip(
    "transformers", reason="pip install 'anybatch[transformers]' is needed for these tests"
)

from accelerate import Accelerator  # noqa: E402
from tests.integrations.loops import accelerated  # noqa: E402
from tests.integrations.trainings import QUIET  # noqa: E402
from tests.integrations.words import N, made, rows, stacked  # noqa: E402
from transformers.trainer_utils import HPSearchBackend  # noqa: E402

from anybatch.integrations.transformers import Trainer  # noqa: E402

EACH, TIMES, RATE = 4, 4, 0.5


def truth() -> dict[str, Tensor]:
    """Parameters after three steps over undivided batches."""
    model, every = made(), rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for start in range(0, N, EACH * TIMES):
        optimizer.zero_grad()
        model(**stacked(every[start : start + EACH * TIMES]))["loss"].backward()
        optimizer.step()
    return model.state_dict()


def arguments(folder: Path, **options: Any) -> Any:
    plain = {
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": EACH,
        "max_steps": 3,
    }
    return transformers.TrainingArguments(str(folder), **{**QUIET, **plain, **options})


class During(transformers.TrainerCallback):
    """Calls a function once, at an event and a step."""

    def __init__(self, event: str, do: Callable[[Any], None], step: int = 0) -> None:
        def act(args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step == step:
                do(args)

        setattr(self, event, act)


def trainer_of(folder: Path, variant: Any = Trainer, **options: Any) -> Any:
    callbacks = options.pop("callbacks", [])
    how = {"micro_batch": 3} if issubclass(variant, Trainer) else {}
    args = arguments(folder, **options)
    return variant(made(), args, train_dataset=rows(), callbacks=callbacks, **how)


def accumulate(args: Any, steps: int = TIMES) -> None:
    args.gradient_accumulation_steps = steps


def in_arguments(folder: Path) -> Any:
    trainer = trainer_of(folder, gradient_accumulation_steps=TIMES)
    trainer.train()
    return trainer


def in_the_plugin(folder: Path, **more: Any) -> Any:
    config = {"gradient_accumulation_kwargs": {"num_steps": TIMES, **more}}
    trainer = trainer_of(folder, accelerator_config=config)
    trainer.train()
    return trainer


def synchronised_each_batch(folder: Path) -> Any:
    return in_the_plugin(folder, sync_each_batch=True)


def after_construction(folder: Path) -> Any:
    trainer = trainer_of(folder)
    accumulate(trainer.args)
    trainer.train()
    return trainer


def in_the_passed_arguments(folder: Path) -> Any:
    args = arguments(folder)
    trainer = Trainer(made(), args, train_dataset=rows(), micro_batch=3)
    accumulate(args)
    trainer.train()
    return trainer


def in_other_arguments(folder: Path) -> Any:
    trainer = trainer_of(folder)
    trainer.args = copy.copy(trainer.args)
    accumulate(trainer.args)
    trainer.train()
    return trainer


def by_set_training(folder: Path) -> Any:
    trainer = trainer_of(folder)
    trainer.args.set_training(
        RATE, EACH, max_steps=3, gradient_accumulation_steps=TIMES, weight_decay=0.0
    )
    trainer.train()
    return trainer


def by_a_callback_at_the_start(folder: Path) -> Any:
    trainer = trainer_of(folder, callbacks=[During("on_init_end", accumulate)])
    trainer.train()
    return trainer


@dataclass
class Trial:
    """As much of optuna's as a Trainer asks for."""

    params: dict[str, Any]
    number: int = 0


def by_a_search(folder: Path, *trials: dict[str, Any]) -> Any:
    """Every trial begins with the same model; what was folded for one is not for the next."""
    trainer = trainer_of(folder, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = attrgetter("params")
    for params in trials or ({"gradient_accumulation_steps": 8},):
        trainer.model.load_state_dict(made().state_dict())
        trainer.optimizer = trainer.lr_scheduler = None
        with pytest.MonkeyPatch.context() as patch:
            files = transformers.integrations.integration_utils
            patch.setattr(files, "hp_params", attrgetter("params"))
            trainer.train(trial=Trial(params))
    return trainer


def by_a_second_trial(folder: Path) -> Any:
    first = {"gradient_accumulation_steps": 1}
    return by_a_search(folder, first, {"gradient_accumulation_steps": 8})


def by_a_trial_of_batch_sizes(folder: Path) -> Any:
    last = {"per_device_train_batch_size": EACH, "gradient_accumulation_steps": TIMES}
    return by_a_search(folder, {"per_device_train_batch_size": 1}, last)


def between_two_trainings(folder: Path) -> Any:
    trainer = trainer_of(folder, learning_rate=0.0)
    trainer.train()
    accumulate(trainer.args)
    trainer.args.learning_rate = RATE
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()
    return trainer


def in_the_environment(folder: Path) -> Any:
    """accelerate's launcher sets it; a Trainer does not heed it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
        return in_arguments(folder)


def from_their_checkpoint(folder: Path) -> Any:
    full = {"per_device_train_batch_size": EACH * TIMES, "save_strategy": "steps", "save_steps": 1}
    trainer_of(folder / "theirs", transformers.Trainer, **full).train()
    trainer = trainer_of(folder)
    accumulate(trainer.args)
    trainer.train(resume_from_checkpoint=str(folder / "theirs" / "checkpoint-1"))
    return trainer


FOLDED = [
    in_arguments,
    in_the_plugin,
    synchronised_each_batch,
    after_construction,
    in_the_passed_arguments,
    in_other_arguments,
    by_set_training,
    by_a_callback_at_the_start,
    by_a_search,
    by_a_second_trial,
    by_a_trial_of_batch_sizes,
    between_two_trainings,
    in_the_environment,
    from_their_checkpoint,
]


@pytest.mark.parametrize("way", FOLDED, ids=lambda way: way.__name__)
def test_three_steps_are_those_of_undivided_batches(tmp_path: Path, way: Any) -> None:
    with accelerated():  # what an Accelerator shares with all others is as if it were the first
        trainer = way(tmp_path)
    assert trainer.state.global_step == 3
    assert trainer.engine.last.samples == 1
    assert_exact(trainer.model.state_dict(), truth())


def test_after_a_training_the_arguments_are_those_that_were_set(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=TIMES)
    trainer.train()
    args = trainer.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (EACH, TIMES)


def by_a_callback(event: str, step: int = 0) -> Any:
    return lambda folder: trainer_of(folder, callbacks=[During(event, accumulate, step)])


def by_the_accelerator(folder: Path) -> Any:
    trainer = trainer_of(folder)
    trainer.accelerator.gradient_accumulation_steps = TIMES
    return trainer


def by_another_accelerator(folder: Path) -> Any:
    """All of a process share their state."""
    trainer = trainer_of(folder)
    Accelerator(cpu=True, gradient_accumulation_steps=TIMES)
    return trainer


def by_the_accelerator_in_a_callback(folder: Path) -> Any:
    trainer = trainer_of(folder)
    trainer.add_callback(During("on_step_begin", lambda _: by_another_accelerator(folder)))
    return trainer


class Twos(Trainer):
    def get_batch_samples(self, iterator: Any, count: int, device: Any) -> Any:
        return super().get_batch_samples(iterator, 2 * count, device)


def by_the_number_of_batches(folder: Path) -> Any:
    return trainer_of(folder, Twos)


class Loads(Trainer):
    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, batch_size=EACH, collate_fn=stacked)
        )


class Batches(Trainer):
    """Batches that somebody has put together, which have no size to tell."""

    def get_train_dataloader(self) -> Any:
        every = rows()
        return [stacked(every[i : i + EACH]) for i in range(0, N, EACH)]


class Sampled(Trainer):
    def get_train_dataloader(self) -> Any:
        sampler = BatchSampler(range(N), EACH, drop_last=False)
        return DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=stacked)


def with_a_loader(variant: Any) -> Any:
    return lambda folder: trainer_of(folder, variant, gradient_accumulation_steps=TIMES)


def by_looking_for_what_fits(folder: Path) -> Any:
    trainer = trainer_of(folder)
    trainer.args.auto_find_batch_size = True
    return trainer


def in_two_places(folder: Path) -> Any:
    config = {"gradient_accumulation_kwargs": {"num_steps": TIMES}}
    return trainer_of(folder, accelerator_config=config, gradient_accumulation_steps=2)


REFUSED = {
    "on_train_begin": (by_a_callback("on_train_begin"), 0, r"args.gradient_acc.* is 4"),
    "on_epoch_begin": (by_a_callback("on_epoch_begin"), 0, r"args.gradient_acc.* is 4"),
    "on_step_begin": (by_a_callback("on_step_begin"), 0, r"args.gradient_acc.* is 4"),
    "on_step_begin, later": (by_a_callback("on_step_begin", 1), 1, r"args.gradient_acc.* is 4"),
    "on_step_end": (by_a_callback("on_step_end", 1), 1, r"args.gradient_acc.* is 4"),
    "accelerator": (by_the_accelerator, 0, r"accelerator.gradient_acc.* is 4"),
    "another accelerator": (by_another_accelerator, 0, r"accelerator.gradient_acc.* is 4"),
    "accelerator, in a callback": (
        by_the_accelerator_in_a_callback,
        0,
        r"accelerator.gradient_acc.* is 4",
    ),
    "batches": (by_the_number_of_batches, 0, r"from get_batch_samples is 2"),
    "own loader": (with_a_loader(Loads), 0, r"one batch of 16 samples, .* have 4: give it"),
    "own batches": (with_a_loader(Batches), 0, r"have no size that it tells: give it"),
    "own sampler": (with_a_loader(Sampled), 0, r"one batch of 16 samples, .* have 4: give it"),
    "auto_find_batch_size": (by_looking_for_what_fits, 0, "reduces it until it fits"),
    "in two places": (in_two_places, 0, "num_steps` is set but"),  # transformers' own refusal
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_would_accumulate_is_refused_before_its_step(tmp_path: Path, way: str) -> None:
    make, steps, match = REFUSED[way]
    with accelerated():
        trainer = None
        with pytest.raises(ValueError, match=match):
            trainer = make(tmp_path)
            trainer.train()
    if trainer is not None:
        assert trainer.state.global_step == steps
        assert all(p.grad is None for p in trainer.model.parameters())
        args = trainer.args
        set_there = TIMES if "args" in match or "loader" in way or "own" in way else 1
        assert args.gradient_accumulation_steps == set_there
        assert args.per_device_train_batch_size == EACH


def test_a_step_outside_of_a_training_is_one_batch_or_refused(tmp_path: Path) -> None:
    with accelerated():
        trainer = trainer_of(tmp_path)
        trainer.create_optimizer()
        accumulate(trainer.args)
        with pytest.raises(ValueError, match=r"set args.gradient_accumulation_steps before train"):
            trainer.training_step(trainer.model, stacked(rows()[:5]))
        accumulate(trainer.args, 1)
        loss = trainer.training_step(trainer.model, stacked(rows()[:5]))
    model = made()
    model(**stacked(rows()[:5]))["loss"].backward()
    got = {name: p.grad for name, p in trainer.model.named_parameters()}
    want = {name: p.grad for name, p in model.named_parameters()}
    assert_exact(got, want)
    assert loss.requires_grad is False
