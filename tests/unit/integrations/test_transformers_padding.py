"""Padding is cut from micro-batches where that was requested, and the plan says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import NotExactError
from anybatch.integrations.transformers_padding import OfTrimmed, Trimmed

V, T = 13, 9
MEANS = {
    "masked mean": lambda x, there: (x * there).sum(1) / there.sum(1),
    "mean of all": lambda x, there: x.mean(1),
    "last": lambda x, there: x[:, -1],
    "largest": lambda x, there: x.max(1)[0],
    "width": lambda x, there: (x * there).sum(1) / x.shape[1] ** 0.5,
}
"""What a model makes of the tokens of a row; the first one heeds its mask."""


class Tokens(nn.Module):
    """Guesses each token from itself and from what is made of its row."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.head, self.way = nn.Embedding(V, 4), nn.Linear(4, V), way
        self.recurrent = nn.GRU(4, 4, batch_first=True) if way == "recurrent" else None
        self.widths: list[int] = []

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        self.widths.append(input_ids.shape[1])
        there = attention_mask[..., None].to(self.head.weight.dtype)
        each = self.embed(input_ids)
        if self.recurrent is not None:
            row = self.recurrent(each)[0][:, -1]
        else:
            row = MEANS[self.way](each, there)
        logits = self.head(each + row[:, None])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def batch(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    mask = (torch.arange(T) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, V, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


LENGTHS = (3, 9, 2, 5, 7, 2, 4)
FULL = (T,) * 7


def trained(engine: Engine, ears: Trimmed, rows: dict[str, Tensor]) -> Any:
    ears.model.zero_grad()
    return state_of(ears.model, engine.backward(ears.ordered(rows)))


def ears_and_engine(model: nn.Module, *, cuts: bool) -> tuple[Trimmed, Engine]:
    ears = Trimmed(model, cuts=cuts)
    return ears, Engine(ears, OfTrimmed(ears, "say so"), micro_batch=2)


@pytest.mark.product
@pytest.mark.parametrize("first", [LENGTHS, FULL], ids=["padded", "full"])
@pytest.mark.parametrize("way", [*MEANS, "recurrent"])
def test_columns_of_padding_remain_by_default(way: str, first: tuple[int, ...]) -> None:
    model = Tokens(way).double()
    ears, engine = ears_and_engine(model, cuts=False)
    for lengths in (first, LENGTHS):
        rows, truth = batch(lengths), copy_of(model)
        truth.zero_grad()
        loss = truth(**rows)["loss"]
        loss.backward()
        assert_exact(trained(engine, ears, rows), state_of(truth, loss))
    assert engine.plan is not None
    assert engine.plan.exact
    assert set(model.widths) == {T}


def test_columns_of_padding_are_cut_where_that_was_requested() -> None:
    model, rows = Tokens("masked mean").double(), batch(LENGTHS)
    ears, engine = ears_and_engine(model, cuts=True)
    trained(engine, ears, batch(FULL))
    truth = copy_of(model)
    truth.zero_grad()
    loss = truth(**rows)["loss"]
    loss.backward()
    assert_exact(trained(engine, ears, rows), state_of(truth, loss))
    assert model.widths[-4:] == [9, 5, 3, 2]
    assert engine.plan is not None
    assert engine.plan.exact.state == "not shown"
    assert "cut_padding=True" in engine.plan.exact.by


@pytest.mark.parametrize("way", ["mean of all", "last", "width", "recurrent"])
def test_a_model_that_does_not_heed_its_mask_is_refused_when_padding_comes(way: str) -> None:
    model = Tokens(way).double()
    ears, engine = ears_and_engine(model, cuts=True)
    trained(engine, ears, batch(FULL))  # which tells nothing
    with pytest.raises(NotExactError, match="must use its attention mask where cut_padding=True"):
        ears.ordered(batch(LENGTHS))


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
    ears = Trimmed(Tokens("masked mean"), cuts=True)
    rows = change(batch(LENGTHS))
    assert ears.ordered(rows) is rows


def test_a_batch_that_is_not_divided_is_left_as_it_is() -> None:
    model = Tokens("masked mean")
    ears = Trimmed(model, cuts=True)
    ears(**ears.ordered(batch((2, 3))))
    assert model.widths[-1] == T


def cutting(model: nn.Module) -> Trimmed:
    ears = Trimmed(model, cuts=True)
    ears._rows = 3
    return ears


def test_labels_beyond_the_mask_are_retained() -> None:
    rows = batch((2, 3))
    rows["labels"][0, 6] = 5
    model = Tokens("masked mean")
    cutting(model)(**rows)
    assert model.widths == [7]


def test_both_sides_of_an_encoder_and_a_decoder_are_cut() -> None:
    observed: dict[str, Any] = {}

    class Pair(nn.Module):
        config = type("Config", (), {"is_encoder_decoder": True})

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(V))

        def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
            observed.update({name: value.shape[1] for name, value in inputs.items()})
            labels = inputs["labels"]
            logits = self.weight.expand(*labels.shape, V)
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    rows = batch((2, 4))
    rows["labels"] = torch.tensor([[1, 2, 3, -100, -100, -100], [1, -100, -100, -100, -100, -100]])
    cutting(Pair())(**rows)
    assert observed == {"input_ids": 4, "attention_mask": 4, "labels": 3}
