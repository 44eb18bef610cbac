"""Padding is cut from micro-batches where that changes nothing, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.integrations.transformers_padding import Trimmed
from anybatch.loss.heard import OfModel

V, T = 13, 9


class Tokens(nn.Module):
    """Guesses each token from the mean of those that its mask shows it, or from all."""

    def __init__(self, *, heeds: bool) -> None:
        super().__init__()
        self.embed, self.head, self.heeds = nn.Embedding(V, 4), nn.Linear(4, V), heeds
        self.widths: list[int] = []

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        self.widths.append(input_ids.shape[1])
        there = attention_mask if self.heeds else torch.ones_like(attention_mask)
        there = there[..., None].to(self.head.weight.dtype)
        each = self.embed(input_ids)
        logits = self.head(each + (each * there).sum(1, keepdim=True) / there.sum(1, keepdim=True))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def batch(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    mask = (torch.arange(T) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, V, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


LENGTHS = (3, 9, 2, 5, 7, 2, 4)


def trained(model: Tokens, rows: dict[str, Tensor]) -> tuple[Any, Trimmed]:
    ears = Trimmed(model)
    engine = Engine(ears, OfModel(ears), micro_batch=2)
    given = ears.ordered(rows)
    model.widths.clear()
    return state_of(model, engine.backward(given)), ears


@pytest.mark.parametrize("heeds", [True, False])
def test_the_gradient_is_that_of_the_padded_batch(heeds: bool) -> None:
    model, rows = Tokens(heeds=heeds).double(), batch(LENGTHS)
    truth = copy_of(model)
    loss = truth(**rows)["loss"]
    loss.backward()
    got, ears = trained(model, rows)
    assert ears.trims is heeds
    assert_exact(got, state_of(truth, loss))
    assert model.widths[-4:] == ([9, 5, 3, 2] if heeds else [T] * 4)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: {**rows, "attention_mask": rows["attention_mask"].flip(1)},
        lambda rows: {k: v for k, v in rows.items() if k != "attention_mask"},
        lambda rows: {**rows, "start_positions": torch.zeros(len(LENGTHS), dtype=torch.long)},
    ],
    ids=["padded on the left", "without a mask", "with positions"],
)
def test_other_batches_are_left_as_they_are(change: Any) -> None:
    ears = Trimmed(Tokens(heeds=True))
    rows = change(batch(LENGTHS))
    assert ears.ordered(rows) is rows
    assert ears.trims is False


def test_labels_beyond_the_mask_are_kept() -> None:
    rows = batch((2, 3))
    rows["labels"][0, 6] = 5
    ears = Trimmed(Tokens(heeds=True))
    ears.trims = True
    ears(**rows)
    assert ears.model.widths == [7]  # type: ignore[comparison-overlap]


def test_both_sides_of_an_encoder_and_a_decoder_are_cut() -> None:
    seen: dict[str, Any] = {}

    class Pair(nn.Module):
        config = type("Config", (), {"is_encoder_decoder": True})

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(V))

        def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
            seen.update({name: value.shape[1] for name, value in inputs.items()})
            labels = inputs["labels"]
            logits = self.weight.expand(*labels.shape, V)
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    rows = batch((2, 4))
    rows["labels"] = torch.tensor([[1, 2, 3, -100, -100, -100], [1, -100, -100, -100, -100, -100]])
    ears = Trimmed(Pair())
    ears.trims = True
    ears(**rows)
    assert seen == {"input_ids": 4, "attention_mask": 4, "labels": 3}
