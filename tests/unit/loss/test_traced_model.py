"""OfModel: a model's own loss, exact for any split without a declaration, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, snapshot, state_of
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, LazyBatch
from anybatch.errors import LossError, NotExactError
from anybatch.loss.traced_model import OfModel, TracedModel

N, T, V = 7, 5, 11


class Language(nn.Module):
    """A small language model; `lose` takes its loss of logits and labels."""

    def __init__(self, lose: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 6), nn.Linear(6, V)
        self.lose = lose

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embed(ids)))
        return {"loss": self.lose(logits, labels), "logits": logits}


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def two_terms(logits: Tensor, labels: Tensor) -> Tensor:
    return shifted(logits, labels) + 0.1 * F.cross_entropy(logits[:, 0], labels[:, 0].clamp(min=0))


def written(logits: Tensor, labels: Tensor) -> Tensor:
    labels = labels.clone()
    labels[labels == 3] = -100  # no recipe any more: the denominator comes late
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    labels = torch.randint(V, (N, T))
    labels[torch.rand(N, T) < 0.4] = -100
    labels[2] = -100  # a micro-batch of one has nothing to predict
    labels[:, 0] = 4
    return {"ids": torch.randint(V, (N, T)), "labels": labels}


def traced_engine(model: nn.Module, **options: Any) -> Engine:
    ears = TracedModel(model)
    return Engine(ears, OfModel(ears), **options)


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("lose", [shifted, two_terms, written])
def test_the_gradient_is_that_of_the_undivided_batch(lose: Any, micro_batch: int) -> None:
    model, rows = Language(lose).double(), batch()
    if lose is not two_terms:
        rows["labels"][2] = -100
    truth = copy_of(model)
    loss = truth(**rows)["loss"]
    loss.backward()
    got = copy_of(model)
    engine = traced_engine(got, micro_batch=micro_batch)
    for _ in range(2):
        got.zero_grad()
        found = engine.backward(dict(rows))
    want = {n: t for n, t in state_of(truth, loss).items() if n != "loss"}
    have = {n: t for n, t in state_of(got, found).items() if n != "loss"}
    assert_exact(have, want)
    torch.testing.assert_close(found, loss.detach(), rtol=1e-6, atol=0)
    assert_exact({"loss": engine.evaluate(dict(rows))}, {"loss": found})


class Returns(Language):
    """The same, whose loss comes in another form."""

    form: Callable[[Tensor, Tensor], Any]

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        found = super().forward(ids, labels)
        return self.form(found["loss"], found["logits"])


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a tensor": lambda loss, _: loss,
    "a tuple": lambda loss, logits: (loss, logits),
    "an object": lambda loss, logits: SimpleNamespace(loss=loss, logits=logits),
}


@pytest.mark.parametrize("form", FORMS)
def test_in_any_form_in_which_the_loss_is_returned_it_is_traced(form: str) -> None:
    model, rows = Returns(shifted).double(), batch()
    model.form = FORMS[form]
    twin = copy_of(model)
    loss = traced_engine(model, micro_batch=3).backward(rows)
    want = twin.lose(twin.head(torch.tanh(twin.embed(rows["ids"]))), rows["labels"])
    want.backward()
    assert_exact({"loss": loss, **grads(model)}, {"loss": want.detach(), **grads(twin)})


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_a_model_keeps_no_hook_and_no_attribute() -> None:
    model, rows = Language(shifted), batch()
    engine = traced_engine(model, micro_batch=2)
    before = snapshot(model)["hooks"]
    engine.backward(rows)
    assert snapshot(model)["hooks"] == before
    assert set(vars(model)) == set(vars(Language(shifted)))


def test_a_lazy_batch_counts_on_the_way() -> None:
    model, rows = Language(shifted).double(), batch()
    items = [{name: column[i] for name, column in rows.items()} for i in range(N)]
    truth, got = copy_of(model), copy_of(model)
    loss = truth(**rows)["loss"]
    loss.backward()
    found = traced_engine(got, micro_batch=3).backward(LazyBatch(items))  # type: ignore[arg-type]
    assert_exact(state_of(got, found), state_of(truth, loss))


def test_within_a_budget() -> None:
    model, rows = Language(shifted), batch()
    engine = traced_engine(model, memory="200KiB")
    engine.backward(rows)
    assert engine.last is not None
    assert engine.last.peak_bytes <= 200 << 10


def contrast(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.flatten(1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def by_size(logits: Tensor, labels: Tensor) -> Tensor:
    return shifted(logits, labels) * len(logits)


def penalty(logits: Tensor, labels: Tensor) -> Tensor:
    return shifted(logits, labels) + logits.mean() ** 2


@pytest.mark.parametrize(
    ("lose", "match"),
    [
        (contrast, "do not grow with the samples: declare|samples must not meet"),
        (by_size, "that of cross_entropy is . for . samples and . for .: declare"),
        (penalty, r"added to it, .* in mean computes it .*anybatch.coupled"),
        (lambda logits, labels: logits.amax(), r"something else \(Amax\)"),
    ],
)
def test_what_is_no_sum_over_samples_is_refused_by_name(lose: Any, match: str) -> None:
    with pytest.raises((LossError, NotExactError), match=match):
        traced_engine(Language(lose).double(), micro_batch=3).backward(batch())


def test_undivided_any_loss_of_a_model_is_used_as_it_is() -> None:
    model, rows = Language(penalty).double(), batch()
    truth, got = copy_of(model), copy_of(model)
    loss = truth(**rows)["loss"]
    loss.backward()
    found = traced_engine(got, micro_batch=N).backward(rows)
    assert_exact(state_of(got, found), state_of(truth, loss))


def test_a_model_without_a_loss_is_reported() -> None:
    model = Language(shifted)
    model.forward = lambda ids, labels: {"logits": model.head(model.embed(ids))}  # type: ignore[method-assign]
    with pytest.raises(LossError, match="it returned logits: does the batch hold labels"):
        traced_engine(model, micro_batch=3).backward(batch())
