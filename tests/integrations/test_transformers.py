"""`Trainer`: the batch of a transformers.Trainer, whatever it is split into.

Real models of every kind with random weights; the truth is one forward of the undivided batch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of
from torch import Tensor, nn

from anybatch import BudgetError, LossError, NotExactError, NotYetError
from anybatch._check import permuted
from anybatch.batch import TensorBatch
from anybatch.exactness import error_of

transformers = pytest.importorskip(
    "transformers", reason="pip install 'anybatch[transformers]' is needed for these tests"
)

from benchmarks.integrations.transformers.families import (  # noqa: E402
    FAMILIES,
    SIZE,
    VOCABULARY,
    Family,
    made,
)
from tests.integrations.trainings import Seen, arguments, train  # noqa: E402

from anybatch.integrations.transformers import Trainer  # noqa: E402

N = 22
BY_NAME = {family.name: family for family in FAMILIES}


Losing = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def undivided(model: nn.Module, batch: dict[str, Tensor], lose: Losing) -> dict[str, Tensor]:
    copied = copy_of(model).train()
    loss = lose(copied, dict(batch))
    loss.backward()
    return state_of(copied, loss)


def noise(model: nn.Module, batch: dict[str, Tensor], lose: Losing) -> dict[str, float]:
    """What undivided runs differ by: in the order of rows, or in what backward starts from."""
    want, size = undivided(model, batch, lose), len(next(iter(batch.values())))
    scaled = undivided(model, batch, lambda *given: 3.0 * lose(*given))
    others = [{n: x / 3 if n.endswith((".grad", "loss")) else x for n, x in scaled.items()}]
    for _ in range(4):
        other = permuted(TensorBatch.of(batch, None), torch.randperm(size)).inputs
        others.append(undivided(model, other, lose))
    errors = [error_of(other, want) for other in others]
    return {name: max(error[name] for error in errors) for name in want}


def assert_whole(seen: Seen, lose: Losing = own_loss) -> None:
    """Assert Law 1 for every step that was seen.

    The loss apart: most models take it in float32, whatever they compute in.
    """
    assert seen.after
    for model, batch, got in zip(seen.before, seen.batches, seen.after, strict=False):
        want, between = undivided(model, batch, lose), noise(model, batch, lose)
        loss = {"loss": max(between.pop("loss"), torch.finfo(want["loss"].dtype).eps)}
        assert_exact({"loss": got.pop("loss")}, {"loss": want.pop("loss")}, loss)
        assert_exact(got, want, between)


def double(family: Family) -> nn.Module:
    return family.model().double()


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_gradients_are_those_of_the_undivided_batch(
    tmp_path: Path, family: Family, micro_batch: int
) -> None:
    _, seen = train(
        Trainer,
        double(family),
        family.rows(N, 0),
        tmp_path,
        {"micro_batch": micro_batch},
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    assert_whole(seen)
    assert seen.calls == ["begin", "end"] * 2
    assert [len(next(iter(batch.values()))) for batch in seen.batches[:2]] == [8, 8]


def final(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["Llama", "T5", "ResNet, BatchNorm"])
def test_a_training_is_that_of_the_undivided_batch(tmp_path: Path, name: str) -> None:
    """Clipped, scheduled, with decay of some parameters: 20 steps beside transformers' own."""
    family, given = BY_NAME[name], {"max_steps": 20, "weight_decay": 0.1, "warmup_steps": 3}
    own, ours = double(family), double(family)
    clipped = {**given, "max_grad_norm": 0.1}
    train(
        transformers.Trainer,
        own,
        family.rows(N, 0),
        tmp_path / "a",
        per_device_train_batch_size=8,
        **clipped,
    )
    trainer, _ = train(
        Trainer,
        ours,
        family.rows(N, 0),
        tmp_path / "b",
        {"micro_batch": 3},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        **clipped,
    )
    assert trainer.state.global_step == 20
    assert trainer.state.epoch == pytest.approx(20 / 3)
    errors = error_of(final(ours), final(own))
    assert max(errors.values()) < (1e-9 if name != "Llama" else 1e-4), errors  # a float32 inside


def test_steps_epochs_and_logs_are_those_of_accumulation(tmp_path: Path) -> None:
    family = BY_NAME["BERT, tags"]
    given = {
        "num_train_epochs": 2,
        "max_steps": -1,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    }
    rows = family.rows(N, 0)
    own, _ = train(transformers.Trainer, double(family), rows, tmp_path / "a", **given)
    ours, seen = train(Trainer, double(family), rows, tmp_path / "b", {"micro_batch": 3}, **given)
    keys = ("step", "learning_rate")
    logs = [[[log.get(key) for key in keys] for log in t.state.log_history] for t in (own, ours)]
    assert logs[0] == logs[1]
    assert ours.state.epoch == own.state.epoch == 2
    assert (ours.state.max_steps, ours.state.num_train_epochs) == (own.state.max_steps, 2)
    assert seen.calls.count("end") == own.state.global_step
    assert ours.get_total_train_batch_size(ours.args) == own.get_total_train_batch_size(own.args)


def test_the_arguments_of_the_person_stay_theirs(tmp_path: Path) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    trainer = Trainer(BY_NAME["GPT-2"].model(), args)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 4)
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (
        8,
        1,
    )


def test_memory_is_a_ceiling_and_the_plan_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = BY_NAME["GPT-2"]
    transformers.utils.logging.enable_propagation()
    try:
        with caplog.at_level("INFO", logger="transformers"):
            trainer, seen = train(
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
    assert_whole(seen)
    last = trainer.engine.last
    assert 1 <= last.micro_batch < N
    assert last.predicted_bytes <= 700 << 10
    said = [record.getMessage() for record in caplog.records]
    assert any(text == str(trainer.engine.plan) for text in said)
    assert any("the logits of a micro-batch take" in text for text in said)


def test_what_does_not_fit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    family = BY_NAME["Llama"]
    with pytest.raises(BudgetError, match="floor|needs|fit"):
        train(Trainer, double(family), family.rows(N, 0), tmp_path, {"memory": "20KiB"})


@pytest.mark.parametrize("name", ["GPT-2", "BERT, masked tokens", "T5"])
def test_label_smoothing(tmp_path: Path, name: str) -> None:
    family = BY_NAME[name]
    trainer, seen = train(
        Trainer,
        family.model(),  # the smoother sums in float32
        [{**row, **decoder_inputs(name, row)} for row in family.rows(N, 0)],
        tmp_path,
        {"micro_batch": 3},
        label_smoothing_factor=0.2,
        per_device_train_batch_size=8,
    )

    def smoothed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        loss: Tensor = trainer.label_smoother(model(**batch), labels, shift_labels=name == "GPT-2")
        return loss

    assert_whole(seen, smoothed)


def decoder_inputs(name: str, row: dict[str, Tensor]) -> dict[str, Tensor]:
    if name != "T5":
        return {}
    return {"decoder_input_ids": row["labels"].clamp(min=0).roll(1)}


def per_token(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Sum over tokens by the items of the batch, as the documentation of transformers has it."""
    logits, aims = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    found = nn.functional.cross_entropy(logits, aims, reduction="sum")
    return found / num_items_in_batch


def coupled(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss in which every sample meets every other."""
    scores = outputs.logits.flatten(1)[:, :4].softmax(-1)
    return (scores @ scores.T).log().sum() + labels.clamp(min=0).double().mean()


LOSSES = [(per_token, "streaming"), (coupled, "gathering")]


@pytest.mark.parametrize(("function", "mechanism"), LOSSES)
def test_a_loss_function_of_the_person(tmp_path: Path, function: Any, mechanism: str) -> None:
    family = BY_NAME["GPT-2"]
    trainer, seen = train(
        Trainer,
        double(family),
        family.rows(N, 0),
        tmp_path,
        {"micro_batch": 3, "compute_loss_func": function},
        per_device_train_batch_size=8,
    )
    assert trainer.engine.plan.mechanism == mechanism

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        found: Tensor = function(model(**batch), labels, int((labels != -100).sum()))
        return found

    assert_whole(seen, loss)


def in_bfloat16(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(**batch).loss
    return loss


@pytest.mark.parametrize("how", [{"micro_batch": 3}, {"memory": "1MiB"}], ids=str)
@pytest.mark.parametrize("name", ["Llama", "BERT, classes", "T5"])
def test_mixed_precision(tmp_path: Path, name: str, how: dict[str, Any]) -> None:
    """As near to the truth as the undivided batch in mixed precision is."""
    family = BY_NAME[name]
    trainer, seen = train(
        Trainer,
        family.model(),
        family.rows(N, 0),
        tmp_path,
        how,
        bf16=True,
        per_device_train_batch_size=8,
    )
    for model, batch, got in zip(seen.before, seen.batches, seen.after, strict=False):
        truth = undivided(copy_of(model).double(), batch, own_loss)
        mixed = undivided(model, batch, in_bfloat16)
        assert max(error_of(mixed, truth).values()) > 1e-4  # it is mixed indeed
        assert_exact(got, truth, error_of(mixed, truth))
    assert "forward" in vars(trainer.model)  # accelerate's is there again


@pytest.mark.parametrize("name", ["GPT-2", "T5", "ViT"])
def test_checkpointed_activations(tmp_path: Path, name: str) -> None:
    family = BY_NAME[name]
    _, seen = train(
        Trainer,
        double(family),
        family.rows(N, 0),
        tmp_path,
        {"micro_batch": 3},
        activation_checkpointing=True,
        per_device_train_batch_size=8,
    )
    assert_whole(seen)


def test_frozen_parameters_stay_without_gradient(tmp_path: Path) -> None:
    family = BY_NAME["Llama"]
    model = double(family)
    model.requires_grad_(False)
    for parameter in model.lm_head.parameters():
        parameter.requires_grad_(True)
    how = {"micro_batch": 3}
    _, seen = train(Trainer, model, family.rows(N, 0), tmp_path, how, per_device_train_batch_size=8)
    assert_whole(seen)
    assert [name for name in seen.after[0] if name.endswith(".grad")] == ["lm_head.weight.grad"]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("GPT-2", {"micro_batch": 3}),
        ("BERT, classes", {"memory": "2MiB"}),
        ("ResNet, BatchNorm", {"memory": "1MiB"}),
    ],
)
def test_a_resumed_training_ends_in_the_same_bits(
    tmp_path: Path, name: str, how: dict[str, Any]
) -> None:
    """Dropout draws too: the dice of a checkpoint are those of the uninterrupted training."""
    family = BY_NAME[name]
    given = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    given["per_device_train_batch_size"] = 8
    rows, whole = family.rows(N, 0), with_dropout(family)
    train(Trainer, whole, rows, tmp_path, how, **given)
    resumed = with_dropout(family)
    trainer, _ = train(
        Trainer, resumed, rows, tmp_path, how, resume=str(tmp_path / "checkpoint-2"), **given
    )
    assert trainer.state.global_step == 6
    for (key, a), (_, b) in zip(
        whole.state_dict().items(), resumed.state_dict().items(), strict=True
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


@pytest.mark.parametrize("bf16", [False, True])
def test_evaluation_is_that_of_transformers(tmp_path: Path, bf16: bool) -> None:
    family, found = BY_NAME["BERT, classes"], []
    for kind in (transformers.Trainer, Trainer):
        trainer, _ = train(
            kind,
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
    with pytest.raises(NotExactError, match="overrides compute_loss: pass compute_loss_func"):
        Overrides(model, arguments(tmp_path))
    with pytest.raises(ValueError, match="auto_find_batch_size=True makes it smaller"):
        Trainer(model, arguments(tmp_path, auto_find_batch_size=True))
    with pytest.raises(NotYetError, match="compiled model .* torch_compile=True"):
        Trainer(model, arguments(tmp_path, torch_compile=True))


def mixture() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, **SIZE, num_key_value_heads=2, output_router_logits=True
    )
    return made(transformers.MixtralForCausalLM, config)


def test_a_loss_in_which_samples_meet_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LossError, match=r"something else \(.*compute_loss_func="):
        train(
            Trainer,
            mixture(),
            BY_NAME["Llama"].rows(N, 0),
            tmp_path,
            {"micro_batch": 3},
            per_device_train_batch_size=8,
        )


@pytest.mark.parametrize("name", ["GPT-2", "ResNet, BatchNorm"])
def test_two_ranks(tmp_path: Path, name: str) -> None:
    """Real processes on gloo: loss and gradients are those of the batch of both, on both."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m"]
    words += ["tests.integrations.on_ranks", str(tmp_path), name, "2"]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    model = double(BY_NAME[name])
    for step in range(2):
        rows = [row for rank in ranks for row in rank["rows"][step]]
        model.load_state_dict(ranks[0]["before"][step])
        seen = Seen()
        seen.collate(rows)
        seen.before.append(model)
        for rank in ranks:
            seen.after = [rank["after"][step]]
            assert_whole(seen)
