"""`Trainer`: the batch of a transformers.Trainer, whatever it is split into.

Real models of every kind with random weights; the truth is one forward of the undivided batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, error_of
from torch import Tensor, nn

transformers = pytest.importorskip(
    "transformers", reason="pip install 'anybatch[transformers]' is needed for these tests"
)

from benchmarks.integrations.transformers.families import (  # noqa: E402
    FAMILIES,
    Family,
)
from tests.integrations.trainings import train  # noqa: E402
from tests.integrations.truth import (  # noqa: E402
    BY_NAME,
    N,
    assert_full_batch,
    double,
    own_loss,
    undivided,
)

from anybatch.integrations.transformers import Trainer  # noqa: E402


@pytest.mark.large(few=4)
@pytest.mark.parametrize("micro_batch", [1, 3, 8])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_gradients_are_those_of_the_undivided_batch(
    tmp_path: Path, family: Family, micro_batch: int
) -> None:
    _, observed = train(
        Trainer,
        double(family),
        family.rows(N, 0),
        tmp_path,
        {"micro_batch": micro_batch},
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    assert_full_batch(observed)
    assert observed.calls == ["begin", "end"] * 2
    assert [len(next(iter(batch.values()))) for batch in observed.batches[:2]] == [8, 8]


def final(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.large(few=1)
@pytest.mark.parametrize("name", ["Llama", "T5", "ResNet, BatchNorm"])
def test_a_training_is_that_of_the_undivided_batch(tmp_path: Path, name: str) -> None:
    """Clipped, scheduled, with decay of some parameters: 8 steps beside transformers' own."""
    family, options = BY_NAME[name], {"max_steps": 8, "weight_decay": 0.1, "warmup_steps": 3}
    own, ours = double(family), double(family)
    clipped = {**options, "max_grad_norm": 0.1}
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
    assert trainer.state.global_step == 8
    assert trainer.state.epoch == pytest.approx(8 / 3)
    errors = error_of(final(ours), final(own))
    assert max(errors.values()) < (1e-9 if name != "Llama" else 1e-4), errors  # a float32 inside


@pytest.mark.parametrize("name", ["GPT-2", "BERT, masked tokens", "T5"])
def test_label_smoothing(tmp_path: Path, name: str) -> None:
    family = BY_NAME[name]
    trainer, observed = train(
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

    assert_full_batch(observed, smoothed)


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


LOSSES = [(per_token, "streaming"), (coupled, "two-pass")]


@pytest.mark.parametrize(("function", "mechanism"), LOSSES)
def test_a_loss_function_of_the_person(tmp_path: Path, function: Any, mechanism: str) -> None:
    family = BY_NAME["GPT-2"]
    trainer, observed = train(
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

    assert_full_batch(observed, loss)


def in_bfloat16(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(**batch).loss
    return loss


@pytest.mark.large(few=2)
@pytest.mark.parametrize("how", [{"micro_batch": 3}, {"memory": "1MiB"}], ids=str)
@pytest.mark.parametrize("name", ["Llama", "BERT, classes", "T5"])
def test_mixed_precision(tmp_path: Path, name: str, how: dict[str, Any]) -> None:
    """As near to the truth as the undivided batch in mixed precision is."""
    family = BY_NAME[name]
    trainer, observed = train(
        Trainer,
        family.model(),
        family.rows(N, 0),
        tmp_path,
        how,
        bf16=True,
        per_device_train_batch_size=8,
    )
    for model, batch, got in zip(observed.before, observed.batches, observed.after, strict=False):
        truth = undivided(copy_of(model).double(), batch, own_loss)
        mixed = undivided(model, batch, in_bfloat16)
        assert max(error_of(mixed, truth).values()) > 1e-4  # it is mixed indeed
        assert_exact(got, truth, error_of(mixed, truth))
    assert "forward" in vars(trainer.model)  # accelerate's is there again


@pytest.mark.large(few=1)
@pytest.mark.parametrize("name", ["GPT-2", "T5", "ViT"])
def test_checkpointed_activations(tmp_path: Path, name: str) -> None:
    family = BY_NAME[name]
    _, observed = train(
        Trainer,
        double(family),
        family.rows(N, 0),
        tmp_path,
        {"micro_batch": 3},
        activation_checkpointing=True,
        per_device_train_batch_size=8,
    )
    assert_full_batch(observed)


def test_frozen_parameters_remain_without_gradient(tmp_path: Path) -> None:
    family = BY_NAME["Llama"]
    model = double(family)
    model.requires_grad_(False)
    for parameter in model.lm_head.parameters():
        parameter.requires_grad_(True)
    how = {"micro_batch": 3}
    _, observed = train(
        Trainer, model, family.rows(N, 0), tmp_path, how, per_device_train_batch_size=8
    )
    assert_full_batch(observed)
    assert [name for name in observed.after[0] if name.endswith(".grad")] == ["lm_head.weight.grad"]
