"""open_clip's models, losses and training loop beside an engine: its own scale, its own bias."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from benchmarks.hosts.open_clip import run
from tests.oracle import assert_exact, state_of, undivided
from torch import Tensor, nn

import anybatch

pytest.importorskip("open_clip", reason="needs open_clip: make hosts")
pytestmark = pytest.mark.filterwarnings("ignore")

CASES = [(model, loss) for model in run.MODELS for loss in run.LOSSES]


class Both:
    """A loss of open_clip's on the mapping that its models return."""

    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss

    def __call__(self, found: dict[str, Tensor]) -> Tensor:
        return sum(self.loss(**found, output_dict=True).values())  # type: ignore[return-value]


class Encoder(nn.Module):
    """An encoder of a model of open_clip's, by the name of its method."""

    def __init__(self, clip: Any, name: str) -> None:
        super().__init__()
        self.clip, self.name = clip, name

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = getattr(self.clip, self.name)(rows, normalize=True)
        return found


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize(("name", "loss_name"), CASES)
def test_a_model_and_a_loss_as_they_are(name: str, loss_name: str, size: int) -> None:
    model, loss = run.clip(name, biased=loss_name == "SigLipLoss"), run.loss_of(loss_name)
    want = undivided(model, Both(loss), run.batch(), None)
    trained = copy.deepcopy(model)
    engine = anybatch.Engine(trained, Both(loss), micro_batch=size)
    assert_exact(state_of(trained, engine.backward(run.batch())), want)
    assert "logit_scale.grad" in want
    assert ("logit_bias.grad" in want) == (loss_name == "SigLipLoss")
    plan = engine.plan
    assert plan is not None
    assert plan.mechanism == "two-pass"
    assert plan.exact


@pytest.mark.parametrize("loss_name", run.LOSSES)
def test_one_encoder_after_the_other_with_the_models_own_scale(loss_name: str) -> None:
    model, loss = run.clip("CLIP", biased=loss_name == "SigLipLoss"), run.loss_of(loss_name)
    want = undivided(model, Both(loss), run.batch(), None)
    trained = copy.deepcopy(model)
    both = anybatch.Encoders({
        "image_features": Encoder(trained, "encode_image"),
        "text_features": Encoder(trained, "encode_text"),
    })  # fmt: skip

    def loss_fn(found: dict[str, Tensor]) -> Tensor:
        bias = {} if trained.logit_bias is None else {"logit_bias": trained.logit_bias}
        value: Tensor = loss(**found, logit_scale=trained.logit_scale.exp(), **bias)
        return value

    images, texts = run.batch()
    engine = anybatch.Engine(both, loss_fn, micro_batch=3)
    value = engine.backward({"image_features": images, "text_features": texts})
    assert_exact(state_of(trained, value), want)


def test_similarities_in_tiles_take_the_scale_that_the_model_returns() -> None:
    model = run.clip("CLIP", biased=False)
    want = undivided(model, Both(run.loss_of("ClipLoss")), run.batch(), None)
    trained = copy.deepcopy(model)
    engine = anybatch.Engine(trained, anybatch.contrastive(symmetric=True), micro_batch=3)
    assert_exact(state_of(trained, engine.backward(run.batch())), want)


@pytest.mark.parametrize("parts", run.PARTS.values(), ids=run.PARTS)
def test_the_script_adds_the_gradient_of_the_scale_once_for_each_part(
    parts: tuple[int, ...],
) -> None:
    model, loss = run.clip("CLIP", biased=True), run.loss_of("SigLipLoss")
    want = run.undivided(model, loss)
    script = run.with_script(model, loss, parts)
    for name in run.OWN:
        assert torch.allclose(script[name], len(parts) * want[name], rtol=1e-9)
    got, _ = run.with_engine(model, loss, parts[0])
    assert_exact(got, want)


def test_random_patches_are_those_of_the_undivided_batch() -> None:
    """The script's second forward draws others than its first; an engine's two passes draw once."""
    model = run.clip("CLIP", biased=False, dropped=0.5)
    loss = Both(run.loss_of("ClipLoss"))
    torch.manual_seed(5)
    want = undivided(model, loss, run.batch(), None)
    trained = copy.deepcopy(model)
    engine = anybatch.Engine(trained, loss, micro_batch=3, rng="batch")
    torch.manual_seed(5)
    assert_exact(state_of(trained, engine.backward(run.batch())), want)
