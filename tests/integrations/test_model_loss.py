"""Engine(model) with models of transformers: their loss is that of the undivided batch."""

from __future__ import annotations

import pytest
import torch
from tests.oracle import assert_exact, state_after
from torch import Tensor, nn

from anybatch import Engine, Loss
from anybatch.errors import LossError

pytest.importorskip(
    "transformers", reason="pip install 'anybatch[transformers]' is needed for these tests"
)

from benchmarks.integrations.transformers.families import FAMILIES, Family, collate
from tests.integrations.truth import BY_NAME, double, noise, own_loss, undivided

N = 7
EXPERTS = "Mixtral, experts"


def batch(family: Family, n: int = N) -> dict[str, Tensor]:
    """Rows of uneven lengths, in the precision of the model."""
    rows = collate(family.rows(n, 1))
    return {name: x.double() if x.is_floating_point() else x for name, x in rows.items()}


@pytest.mark.large(few=5)
@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.name != EXPERTS], ids=lambda family: family.name
)
def test_a_loss_is_traced_in_models_of_every_sort(family: Family, micro_batch: int) -> None:
    model, rows = double(family).train(), batch(family)
    want, between = undivided(model, rows, own_loss), noise(model, rows, own_loss)
    got = state_after(model, lambda m: Engine(m, micro_batch=micro_batch).backward(rows))
    # Most models take their loss in float32, whatever they compute in.
    loss = {"loss": max(between.pop("loss"), torch.finfo(want["loss"].dtype).eps)}
    assert_exact({"loss": got.pop("loss")}, {"loss": want.pop("loss")}, loss)
    assert_exact(got, want, between)


def test_an_auxiliary_loss_in_which_samples_meet_is_refused() -> None:
    family = BY_NAME[EXPERTS]
    with pytest.raises(LossError, match=r"do not grow with the samples: declare Loss.*coupled"):
        Engine(double(family).train(), micro_batch=3).backward(batch(family))


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_labels_that_the_model_shifts_are_not_counted_unshifted(name: str) -> None:
    family = BY_NAME[name]
    model: nn.Module = double(family).train()
    loss = Loss.inside(count=lambda inputs, _: (inputs["labels"] != -100).sum())
    with pytest.raises(LossError, match="count says .* and the model divides by .*shifts its"):
        Engine(model, loss, micro_batch=3).backward(batch(family))
