"""Trainings by a Trainer that are looked at: its batches, and its gradients before each update."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from benchmarks.integrations.transformers.families import Row, collate
from tests.oracle import state_of
from torch import Tensor, nn

QUIET = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "dataloader_pin_memory": False,
    "max_grad_norm": 0.0,
    "logging_strategy": "no",
    "learning_rate": 1e-2,
}


class TrainingRecorder(transformers.TrainerCallback):
    """What passes by."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Tensor]] = []
        self.rows: list[list[Row]] = []
        self.before: list[nn.Module] = []
        self.after: list[dict[str, Tensor]] = []
        self.calls: list[str] = []
        self.trainer: Any = None
        self.wide = True

    def collate(self, rows: list[Row]) -> Row:
        batch = collate(rows)
        if self.wide:
            batch = {n: x.double() if x.is_floating_point() else x for n, x in batch.items()}
        self.batches.append(batch)
        self.rows.append(rows)
        return dict(batch)

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.calls.append("begin")
        self.before.append(plain_copy(named["model"]))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        engine = getattr(self.trainer, "engine", None)
        loss = torch.zeros(()) if engine is None else engine.last.loss
        self.after.append(state_of(named["model"], loss))

    def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.calls.append("substep")

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.calls.append("end")


def plain_copy(model: nn.Module) -> nn.Module:
    """Return a copy without gradients, and without what accelerate has put around forward."""
    around = [name for name in ("forward", "_original_forward") if name in vars(model)]
    retained = {name: vars(model).pop(name) for name in around}
    try:
        copied = copy.deepcopy(model)
    finally:
        vars(model).update(retained)
    copied.zero_grad()
    return copied


def arguments(folder: Any, **options: Any) -> Any:
    return transformers.TrainingArguments(str(folder), **{**QUIET, "max_steps": 2, **options})


def train(
    trainer_class: Any,
    model: nn.Module,
    rows: list[Row],
    folder: Any,
    how: dict[str, Any] | None = None,
    resume: str | None = None,
    **options: Any,
) -> tuple[Any, TrainingRecorder]:
    """Return the trainer after training, and what was seen.

    Args:
        trainer_class: the class of the trainer.
        model: is trained.
        rows: the data set.
        folder: for its files.
        how: what the trainer takes beside.
        resume: the checkpoint to go on from.
        options: training arguments.
    """
    recorder = TrainingRecorder()
    recorder.wide = next(model.parameters()).dtype == torch.float64
    trainer = trainer_class(
        model,
        arguments(folder, **options),
        train_dataset=rows,
        data_collator=recorder.collate,
        callbacks=[recorder],
        **(how or {}),
    )
    recorder.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return trainer, recorder
