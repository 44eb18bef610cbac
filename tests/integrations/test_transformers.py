"""`Trainer`: the batch of a transformers.Trainer, whatever it is split into.

Real models of every kind with random weights; the truth is one forward of the undivided batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of
from torch import Tensor, nn

from anybatch._check import permuted
from anybatch.batch import TensorBatch
from anybatch.exactness import error_of

transformers = pytest.importorskip(
    "transformers", reason="pip install 'anybatch[transformers]' is needed for these tests"
)

from benchmarks.integrations.transformers.families import FAMILIES, Family  # noqa: E402
from tests.integrations.trainings import Seen, train  # noqa: E402

from anybatch.integrations.transformers import Trainer  # noqa: E402

N = 22
BY_NAME = {family.name: family for family in FAMILIES}


def undivided(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    copied = copy_of(model).train()
    loss = copied(**batch).loss
    loss.backward()
    return state_of(copied, loss)


def noise(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, float]:
    order = torch.randperm(len(batch["labels" if "labels" in batch else "input_ids"]))
    other = permuted(TensorBatch.of(batch, None), order).inputs
    return error_of(undivided(model, other), undivided(model, batch))


def assert_whole(seen: Seen) -> None:
    """Assert Law 1 for every step that was seen."""
    assert seen.after
    for model, batch, got in zip(seen.before, seen.batches, seen.after, strict=False):
        assert_exact(got, undivided(model, batch), noise(model, batch))


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
