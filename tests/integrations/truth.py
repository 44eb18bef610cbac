"""The truth of a Trainer's step: one forward of its undivided batch, by torch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from benchmarks.integrations.transformers.families import FAMILIES, Family
from tests.integrations.trainings import TrainingRecorder
from tests.oracle import assert_exact, copy_of, state_of
from torch import Tensor, nn

from anybatch.core.batch import TensorBatch
from anybatch.tools.check import permuted
from anybatch.tools.exactness import error_of

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
    scaled = undivided(model, batch, lambda *arguments: 3.0 * lose(*arguments))
    others = [{n: x / 3 if n.endswith((".grad", "loss")) else x for n, x in scaled.items()}]
    for _ in range(4):
        other = permuted(TensorBatch.of(batch, None), torch.randperm(size)).inputs
        others.append(undivided(model, other, lose))
    errors = [error_of(other, want) for other in others]
    return {name: max(error[name] for error in errors) for name in want}


def assert_full_batch(recorder: TrainingRecorder, lose: Losing = own_loss) -> None:
    """Assert Law 1 for every step that was seen.

    The loss apart: most models take it in float32, whatever they compute in.
    """
    assert recorder.after
    for model, batch, got in zip(recorder.before, recorder.batches, recorder.after, strict=False):
        want, between = undivided(model, batch, lose), noise(model, batch, lose)
        loss = {"loss": max(between.pop("loss"), torch.finfo(want["loss"].dtype).eps)}
        assert_exact({"loss": got.pop("loss")}, {"loss": want.pop("loss")}, loss)
        assert_exact(got, want, between)


def double(family: Family) -> nn.Module:
    return family.model().double()
