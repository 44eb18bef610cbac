"""Whole runs of `Trainer`: logs, budgets, checkpoints, evaluation, ranks, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact
from torch import Tensor, nn

from anybatch.errors import BudgetError, LossError, NotExactError, NotYetError

transformers = pytest.importorskip(
    "transformers", reason="pip install 'anybatch[transformers]' is needed for these tests"
)

from benchmarks.integrations.transformers.families import (  # noqa: E402
    Family,
)
from tests.integrations.trainings import TrainingRecorder, arguments, train  # noqa: E402
from tests.integrations.truth import (  # noqa: E402
    BY_NAME,
    N,
    assert_full_batch,
    double,
)

from anybatch.integrations.transformers import Trainer  # noqa: E402


def test_steps_epochs_and_logs_are_those_of_accumulation(tmp_path: Path) -> None:
    family = BY_NAME["BERT, tags"]
    options = {
        "num_train_epochs": 2,
        "max_steps": -1,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    }
    rows = family.rows(N, 0)
    own, _ = train(transformers.Trainer, double(family), rows, tmp_path / "a", **options)
    ours, observed = train(
        Trainer, double(family), rows, tmp_path / "b", {"micro_batch": 3}, **options
    )
    keys = ("step", "learning_rate")
    logs = [[[log.get(key) for key in keys] for log in t.state.log_history] for t in (own, ours)]
    assert logs[0] == logs[1]
    assert ours.state.epoch == own.state.epoch == 2
    assert (ours.state.max_steps, ours.state.num_train_epochs) == (own.state.max_steps, 2)
    assert observed.calls.count("end") == own.state.global_step
    assert ours.get_total_train_batch_size(ours.args) == own.get_total_train_batch_size(own.args)


def test_memory_is_a_ceiling_and_the_plan_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = BY_NAME["GPT-2"]
    transformers.utils.logging.enable_propagation()
    try:
        with caplog.at_level("INFO", logger="transformers"):
            trainer, observed = train(
                Trainer,
                double(family),
                family.rows(N, 0),
                tmp_path,
                {"memory": "700KiB"},
                log_level="info",
                per_device_train_batch_size=N,
            )
    finally:
        transformers.utils.logging.disable_propagation()
    assert_full_batch(observed)
    last = trainer.engine.last
    assert 1 <= last.micro_batch < N
    assert last.predicted_bytes <= 700 << 10
    said = [record.getMessage() for record in caplog.records]
    assert any(text == str(trainer.engine.plan) for text in said)
    assert any("the logits of a micro-batch take" in text for text in said)


def test_experts_are_used_evenly_over_the_batch_in_training_and_evaluation(
    tmp_path: Path,
) -> None:
    """Within a budget; outside of a step transformers' function is its own again."""
    modeling = sys.modules[transformers.MixtralForCausalLM.__module__]
    own = modeling.load_balancing_loss_func
    family, found = BY_NAME["Mixtral, experts"], []
    for trainer_class, how in ((transformers.Trainer, {}), (Trainer, {"memory": "900KiB"})):
        rows = {"eval_dataset": family.rows(60, 1)}
        trainer, observed = train(
            *(trainer_class, double(family), family.rows(N, 0), tmp_path, how | rows),
            per_device_train_batch_size=N,
            per_device_eval_batch_size=60,
            learning_rate=0.0,
        )
        found.append(trainer.evaluate()["eval_loss"])
        assert modeling.load_balancing_loss_func is own
    assert_full_batch(observed)
    last = trainer.engine.last
    assert trainer.engine.plan.mechanism == "lockstep"
    assert 1 <= last.micro_batch < N
    assert last.predicted_bytes <= 900 << 10
    assert trainer._evaluates.engine.last.micro_batches > 1
    own_loss, our_loss = ({"loss": torch.tensor(loss)} for loss in found)
    assert_exact(our_loss, own_loss, {"loss": torch.finfo(torch.float32).eps})  # it is a float32


def test_what_does_not_fit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    family = BY_NAME["Llama"]
    with pytest.raises(BudgetError, match="floor|needs|fit"):
        train(Trainer, double(family), family.rows(N, 0), tmp_path, {"memory": "20KiB"})


@pytest.mark.large(few=1)
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("GPT-2", {"micro_batch": 3}),
        ("GPT-2", {"memory": "300KiB"}),
        ("BERT, classes", {"memory": "290KiB"}),
        ("T5", {"memory": "700KiB"}),
        ("ResNet, BatchNorm", {"memory": "56KiB"}),
    ],
)
def test_a_resumed_training_ends_in_the_same_bits(
    tmp_path: Path, name: str, how: dict[str, Any]
) -> None:
    """Dropout draws too: the dice of a checkpoint are those of the uninterrupted training."""
    family = BY_NAME[name]
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    options["per_device_train_batch_size"] = 8
    rows, full = family.rows(N, 0), with_dropout(family)
    uninterrupted, _ = train(Trainer, full, rows, tmp_path, how, **options)
    assert uninterrupted.engine.last.micro_batch < 8
    resumed = with_dropout(family)
    trainer, _ = train(
        Trainer, resumed, rows, tmp_path, how, resume=str(tmp_path / "checkpoint-2"), **options
    )
    assert trainer.state.global_step == 4
    for (key, a), (_, b) in zip(
        full.state_dict().items(), resumed.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), key


def with_dropout(family: Family) -> nn.Module:
    model = family.model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    return model


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


@pytest.mark.large(few=1)
@pytest.mark.parametrize("bf16", [False, True])
def test_evaluation_is_that_of_transformers(tmp_path: Path, bf16: bool) -> None:
    family, found = BY_NAME["BERT, classes"], []
    for trainer_class in (transformers.Trainer, Trainer):
        trainer, _ = train(
            trainer_class,
            family.model(),
            family.rows(N, 0),
            tmp_path,
            {"eval_dataset": family.rows(9, 1), "compute_metrics": accuracy},
            bf16=bf16,
            eval_strategy="steps",
            eval_steps=1,
            learning_rate=0.0,
            logging_strategy="steps",
        )
        logs = [log for log in trainer.state.log_history if "eval_loss" in log]
        found.append([(log["eval_loss"], log["eval_accuracy"], log["step"]) for log in logs])
    assert found[0] == found[1]
    assert len(found[0]) == 2


class Overrides(Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **named: Any) -> Tensor:
        loss: Tensor = model(**inputs).loss
        return loss


def test_what_decides_the_batch_or_the_loss_is_refused(tmp_path: Path) -> None:
    model = BY_NAME["GPT-2"].model()
    with pytest.raises(NotExactError, match="overrides compute_loss: leave it out of the class"):
        Overrides(model, arguments(tmp_path))
    with pytest.raises(ValueError, match="auto_find_batch_size=True reduces it"):
        Trainer(model, arguments(tmp_path, auto_find_batch_size=True))
    with pytest.raises(NotYetError, match="compiled model .* torch_compile=True"):
        Trainer(model, arguments(tmp_path, torch_compile=True))


class Uneven(nn.Module):
    """A model whose own loss is a product of means over rows, which nobody has marked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = BY_NAME["Llama"].model()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        found = self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        return {"loss": found.loss * found.logits.square().mean(), "logits": found.logits}


def test_a_loss_in_which_samples_meet_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LossError, match=r"something else \(.*compute_loss_func="):
        train(
            Trainer,
            Uneven(),
            BY_NAME["Llama"].rows(N, 0),
            tmp_path,
            {"micro_batch": 3},
            per_device_train_batch_size=8,
        )


@pytest.mark.large(few=1)
@pytest.mark.parametrize("name", ["GPT-2", "ResNet, BatchNorm", "Mixtral, experts"])
def test_two_ranks(tmp_path: Path, name: str) -> None:
    """Real processes on gloo: loss and gradients are those of the batch of both, on both."""
    words = ["tests.integrations.forked", "tests.integrations.on_ranks", str(tmp_path), name, "2"]
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    model = double(BY_NAME[name])
    for step in range(2):
        rows = [row for rank in ranks for row in rank["rows"][step]]
        model.load_state_dict(ranks[0]["before"][step])
        observed = TrainingRecorder()
        observed.collate(rows)
        observed.before.append(model)
        for rank in ranks:
            observed.after = [rank["after"][step]]
            assert_full_batch(observed)
