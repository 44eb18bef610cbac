"""Evaluation in parts: the numbers of a batch in one piece, in the memory that was named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact
from torch import Tensor

from anybatch import BudgetError, tree
from anybatch.meter import Meter

transformers = pytest.importorskip(
    "transformers", reason="pip install 'anybatch[transformers]' is needed for these tests"
)

from benchmarks.integrations.transformers.families import collate  # noqa: E402
from tests.integrations.trainings import arguments, train  # noqa: E402
from tests.integrations.truth import BY_NAME, N, double  # noqa: E402

from anybatch.integrations.transformers import Trainer  # noqa: E402


def wide(rows: Any) -> Any:
    batch = collate(rows)
    return {n: x.double() if x.is_floating_point() else x for n, x in batch.items()}


def trainer_of(kind: Any, name: str, folder: Path, batch: int = N, **how: Any) -> Any:
    torch.manual_seed(0)
    family = BY_NAME[name]
    given = arguments(folder, per_device_eval_batch_size=batch)
    rows = family.rows(N, 0)
    return kind(double(family), given, eval_dataset=rows, data_collator=wide, **how)


def shown(trainer: Any) -> dict[str, Tensor]:
    """Loss, predictions and labels of the data set, by name."""
    found = trainer.predict(trainer.eval_dataset)
    tensors = {"loss": torch.as_tensor(found.metrics["test_loss"])}
    for name, some in (("output", found.predictions), ("labels", found.label_ids)):
        every = (one for _, one in tree.leaves(some))
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


@pytest.mark.parametrize("batch", [N, 9])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_an_evaluation_in_parts_is_that_of_the_trainer(
    tmp_path: Path, name: str, batch: int
) -> None:
    alone = trainer_of(transformers.Trainer, name, tmp_path, batch)
    want = shown(alone) | {"loss": loss_of_model(alone)}
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
    budget = (plan.memory.floor + plan.memory.whole) // 2
    trainer = trainer_of(Trainer, "Llama", tmp_path, memory=f"{budget // 1024}KiB")
    trainer.args.prediction_loss_only = True
    (batch,) = trainer.get_eval_dataloader()
    evaluation = trainer._evaluation_of(trainer.model.eval())
    evaluation.step(trainer, batch, None, loss_only=True)
    model = trainer.model
    with Meter(torch.device("cpu"), {"parameters": [*model.parameters()]}) as meter:
        evaluation.step(trainer, batch, None, loss_only=True)
    assert evaluation.engine.plan.micro_batch < N
    assert meter.peak <= evaluation.engine.last.predicted_bytes <= budget
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss)
    with pytest.raises(BudgetError):
        trainer_of(Trainer, "Llama", tmp_path, memory="1KiB").evaluate()


def test_an_evaluation_between_steps_changes_no_step(tmp_path: Path) -> None:
    family = BY_NAME["Llama"]
    given = {"per_device_train_batch_size": 8, "max_steps": 4, "per_device_eval_batch_size": N}
    ends = []
    for often in ({}, {"eval_strategy": "steps", "eval_steps": 1}):
        model = double(family)
        how = {"micro_batch": 3, "eval_dataset": family.rows(N, 1)}
        train(Trainer, model, family.rows(N, 0), tmp_path, how, **given, **often)
        ends.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert all(torch.equal(ends[1][name], p) for name, p in ends[0].items())
