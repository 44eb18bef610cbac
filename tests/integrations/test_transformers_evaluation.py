"""Evaluation in parts: the numbers of a batch in one piece, in the memory that was named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact
from tests.peaks import metered
from torch import Tensor, nn

from anybatch.core import pytree
from anybatch.errors import BudgetError

transformers = pytest.importorskip(
    "transformers", reason="pip install 'anybatch[transformers]' is needed for these tests"
)

from benchmarks.integrations.transformers.families import collate  # noqa: E402
from tests.integrations.trainings import arguments, train  # noqa: E402
from tests.integrations.truth import BY_NAME, N, double  # noqa: E402
from transformers.modeling_outputs import ModelOutput, SequenceClassifierOutput  # noqa: E402

from anybatch.integrations.transformers import Trainer  # noqa: E402


def wide(rows: Any) -> Any:
    batch = collate(rows)
    return {n: x.double() if x.is_floating_point() else x for n, x in batch.items()}


def trainer_of(trainer_class: Any, name: str, folder: Path, batch: int = N, **how: Any) -> Any:
    torch.manual_seed(0)
    family = BY_NAME[name]
    inputs = arguments(folder, per_device_eval_batch_size=batch)
    rows = family.rows(N, 0)
    return trainer_class(double(family), inputs, eval_dataset=rows, data_collator=wide, **how)


def shown(trainer: Any) -> dict[str, Tensor]:
    """Loss, predictions and labels of the data set, by name."""
    found = trainer.predict(trainer.eval_dataset)
    tensors = {"loss": torch.as_tensor(found.metrics["test_loss"])}
    for name, some in (("output", found.predictions), ("labels", found.label_ids)):
        every = (one for _, one in pytree.leaves(some))
        tensors |= {f"{name} {at}": torch.as_tensor(one) for at, one in enumerate(every)}
    return tensors


def loss_of_model(trainer: Any) -> Tensor:
    """The mean over samples of what the model returns for the batches.

    transformers divides by the labels that it counts: for GPT-2 also those that are not predicted.
    """
    total = torch.zeros((), dtype=torch.float64)
    for batch in trainer.get_eval_dataloader():
        with torch.no_grad():
            loss = trainer.model.eval()(**batch).loss
        total += loss * len(next(iter(batch.values()))) / N
    return total


@pytest.mark.large(few=5)
@pytest.mark.parametrize("batch", [N, 9])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_an_evaluation_in_parts_is_that_of_the_trainer(
    tmp_path: Path, name: str, batch: int
) -> None:
    single = trainer_of(transformers.Trainer, name, tmp_path, batch)
    want = shown(single) | {"loss": loss_of_model(single)}
    trainer = trainer_of(Trainer, name, tmp_path, batch, micro_batch=3)
    got = shown(trainer)
    float32 = {"loss": torch.finfo(torch.float32).eps}  # most models take it so
    assert_exact({"loss": got.pop("loss")}, {"loss": want.pop("loss")}, float32)
    assert_exact(got, want)
    assert trainer._evaluates.engine.last.micro_batches > 1


def test_an_evaluation_keeps_the_budget(tmp_path: Path) -> None:
    free = trainer_of(Trainer, "Llama", tmp_path, memory="1GiB")
    free.args.prediction_loss_only = True
    loss = free.evaluate()["eval_loss"]
    plan = free._evaluates.engine.plan
    assert plan.mechanism == "undivided"
    weights = dict(plan.memory.owners)["parameters"]
    budget = (weights + plan.memory.undivided) // 2
    trainer = trainer_of(Trainer, "Llama", tmp_path, memory=f"{budget // 1024}KiB")
    trainer.args.prediction_loss_only = True
    (batch,) = trainer.get_eval_dataloader()
    evaluation = trainer._evaluation_of(trainer.model.eval())
    evaluation.step(trainer, batch, None, loss_only=True)
    model = trainer.model
    with metered({"parameters": [*model.parameters()]}) as meter:
        evaluation.step(trainer, batch, None, loss_only=True)
    assert evaluation.engine.plan.micro_batch < N
    assert meter.peak <= evaluation.engine.last.predicted_bytes <= budget
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss)
    with pytest.raises(BudgetError):
        trainer_of(Trainer, "Llama", tmp_path, memory="1KiB").evaluate()


def test_a_share_of_the_free_memory_is_a_budget(tmp_path: Path) -> None:
    trainer = trainer_of(Trainer, "Llama", tmp_path, memory="80%")
    trainer.evaluate()
    trainer.args.max_steps = 1
    trainer.train_dataset = trainer.eval_dataset
    trainer.train()
    for engine in (trainer._evaluates.engine, trainer.engine):
        assert engine.plan.memory.source.endswith("80 % of it")


def test_an_evaluation_between_steps_changes_no_step(tmp_path: Path) -> None:
    family = BY_NAME["Llama"]
    options = {"per_device_train_batch_size": 8, "max_steps": 4, "per_device_eval_batch_size": N}
    ends = []
    for often in ({}, {"eval_strategy": "steps", "eval_steps": 1}):
        model = double(family)
        how = {"micro_batch": 3, "eval_dataset": family.rows(N, 1)}
        train(Trainer, model, family.rows(N, 0), tmp_path, how, **options, **often)
        ends.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert all(torch.equal(ends[1][name], p) for name, p in ends[0].items())


@dataclass
class Named(ModelOutput):  # type: ignore[misc]
    """What a model of transformers returns, within another."""

    y: Tensor | None = None
    h: Tensor | None = None


class FixedOutputs(nn.Module):
    """A model that returns the chosen ones of its loss, outputs `y` [n, 2] and `h` [n, 3]."""

    def __init__(
        self, returned: Any, names: tuple[str, ...] = ("labels",), config: Any = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.y, self.h = nn.Linear(3, 2).double(), nn.Linear(3, 3).double()
        self.returned, self.names = returned, names
        if config is not None:
            self.config = config

    def forward(self, x: Tensor, **labels: Tensor) -> Any:
        y, h = self.y(x), self.h(x)
        return self.returned(nn.functional.mse_loss(y, labels[self.names[0]]), y, h)


class Passing:
    """A config with names that are not wanted at inference."""

    def __init__(self) -> None:
        self.keys_to_ignore_at_inference = ["hidden", "past_key_values"]


RETURNED = {
    "tuple": lambda loss, y, h: (loss, y),
    "tuple of three": lambda loss, y, h: (loss, y, h),
    "loss in a tuple": lambda loss, y, h: (loss,),
    "nested tuples": lambda loss, y, h: (loss, (y, (h, y + 1))),
    "one nested tuple": lambda loss, y, h: (loss, ((y,),)),
    "tuple with a dict": lambda loss, y, h: (loss, {"y": y, "h": h}),
    "dict": lambda loss, y, h: {"loss": loss, "logits": y},
    "dict of three": lambda loss, y, h: {"loss": loss, "logits": y, "hidden": h},
    "loss in a dict": lambda loss, y, h: {"loss": loss},
    "loss last": lambda loss, y, h: {"logits": y, "hidden": h, "loss": loss},
    "a name of ours": lambda loss, y, h: {"loss": loss, "outputs": (y, h)},
    "numbers for names": lambda loss, y, h: {"loss": loss, "1": y, "0": h},
    "dict with tuples": lambda loss, y, h: {"loss": loss, "logits": y, "hidden": (h, (y, h))},
    "output": lambda loss, y, h: SequenceClassifierOutput(
        loss=loss, logits=y, hidden_states=(h, y)
    ),
    "outputs in outputs": lambda loss, y, h: {"loss": loss, "logits": y, "text": Named(y=y, h=h)},
    "past": lambda loss, y, h: {"loss": loss, "logits": y, "past_key_values": ((h, h), (y, y))},
    "list": lambda loss, y, h: [loss, y, h],
    "samples second": lambda loss, y, h: (loss, y.T, h.T[None]),
    "without rows": lambda loss, y, h: (loss, y, h.mean()),
    "whole numbers": lambda loss, y, h: (loss, y.argmax(1), h > 0),
}
REQUESTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "loss only": {"prediction_loss_only": True},
    "ignored": {"ignore_keys": ["hidden"]},
}


def structure(found: Any) -> Any:
    """Return types, names and shapes of a tree."""
    if isinstance(found, Tensor):
        return tuple(found.shape), found.dtype
    if isinstance(found, dict):
        return type(found), {name: structure(one) for name, one in found.items()}
    return type(found), [structure(one) for one in found] if found is not None else None


@pytest.mark.product
@pytest.mark.parametrize("config", [None, Passing()], ids=["bare", "config"])
@pytest.mark.parametrize("requested", REQUESTED)
@pytest.mark.parametrize("name", RETURNED)
def test_what_is_predicted_keeps_its_structure(
    tmp_path: Path, name: str, requested: str, config: Any
) -> None:
    found = [
        predicted(
            trainer_class, FixedOutputs(RETURNED[name], config=config), tmp_path, requested, how
        )
        for trainer_class, how in (
            (transformers.Trainer, {}),
            (Trainer, {"micro_batch": 2}),
            (Trainer, {"memory": "1GiB"}),
        )
    ]
    want = dict(pytree.tensors(found[0]))
    for ours in found[1:]:
        assert structure(ours) == structure(found[0])
        assert_exact(dict(pytree.tensors(ours)), want)


def predicted(
    trainer_class: Any, model: FixedOutputs, folder: Path, requested: str, how: dict[str, Any]
) -> Any:
    draw = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(7, 3, generator=draw, dtype=torch.float64)}
    batch |= {n: torch.randn(7, 2, generator=draw, dtype=torch.float64) for n in model.names}
    trainer = trainer_class(model, arguments(folder, label_names=list(model.names)), **how)
    options = {"prediction_loss_only": False} | REQUESTED[requested]
    return trainer.prediction_step(model.eval(), batch, **options)


@pytest.mark.parametrize("names", [("labels",), ("a", "b")])
def test_labels_of_several_names_keep_their_structure(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    returned, how = RETURNED["tuple"], {"micro_batch": 2}
    want = predicted(transformers.Trainer, FixedOutputs(returned, names), tmp_path, "plain", {})
    got = predicted(Trainer, FixedOutputs(returned, names), tmp_path, "plain", how)
    assert structure(got) == structure(want)
    assert_exact(dict(pytree.tensors(got)), dict(pytree.tensors(want)))
