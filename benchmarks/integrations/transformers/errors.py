"""How far a Trainer's gradient of a step is from that of its batch, undivided, in float64."""

import tempfile
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from anybatch.integrations.transformers import Trainer
from anybatch.tools.exactness import error_of
from benchmarks.integrations.transformers.families import Family, Row, collate

BATCH, MICRO_BATCH = 8, 2
QUIET = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "dataloader_pin_memory": False,
    "max_grad_norm": 0.0,
    "log_level": "error",
}
WAYS: dict[str, tuple[Any, dict[str, int], dict[str, int]]] = {
    "undivided": (transformers.Trainer, {"per_device_train_batch_size": BATCH}, {}),
    "accumulated": (
        transformers.Trainer,
        {
            "per_device_train_batch_size": MICRO_BATCH,
            "gradient_accumulation_steps": BATCH // MICRO_BATCH,
        },
        {},
    ),
    "anybatch": (
        Trainer,
        {"per_device_train_batch_size": BATCH},
        {"micro_batch": MICRO_BATCH},
    ),
}
"""The class, its training arguments, and what ours takes beside."""


class Watching(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps rows and gradients of the first step, by which nothing was updated."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.gradients: dict[str, Tensor] = {}

    def collate(self, rows: list[Row]) -> Row:
        self.rows += rows
        return double(collate(rows))

    def on_pre_optimizer_step(self, *_: Any, **named: Any) -> None:
        self.gradients = gradients(named["model"])


def double(batch: Row) -> Row:
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def truth(family: Family, rows: list[Row]) -> dict[str, Tensor]:
    """The gradient of one forward of all rows, by torch alone."""
    model = family.model().double().train()
    model(**double(collate(rows))).loss.backward()
    return gradients(model)


def error(family: Family, way: str, seed: int) -> float:
    """The worst error of the gradients of a step, by the measure of Law 1."""
    trainer, arguments, how = WAYS[way]
    watching = Watching()
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(folder, max_steps=1, seed=seed, **QUIET, **arguments)
        trainer(
            family.model().double(),
            args,
            train_dataset=family.rows(3 * BATCH, seed),
            data_collator=watching.collate,
            callbacks=[watching],
            **how,
        ).train()
    return float(max(error_of(watching.gradients, truth(family, watching.rows[:BATCH])).values()))


def errors(families: list[Family], seeds: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """The worst of several seeds, by family and way."""
    torch.set_num_threads(1)
    return {
        family.name: {way: max(error(family, way, seed) for seed in seeds) for way in WAYS}
        for family in families
    }
