"""Walks through a model, and steps on one that was changed after several steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from anybatch import Engine
from anybatch.core import modules
from anybatch.core.modules import (
    call_model,
    first_parameter,
    in_training,
    storage_of,
    storages_of,
    training_modes,
    walk,
)


def nested() -> nn.Module:
    """A model with a module under two names, one inside of itself, and a name without a module."""
    shared = nn.Linear(2, 2)
    last = nn.Sequential(nn.Tanh(), shared)
    model = nn.Sequential(nn.Sequential(nn.ReLU(), shared), shared, last)
    model[0].add_module("itself", model)
    model[0].add_module("none", None)
    return model


class Chosen(nn.Module):
    """A model with parameters of its own choice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:  # noqa: FBT002
        return self.second.parameters(recurse)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("none", None)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(2, 2),
    "nested": nested,
    "chosen": Chosen,
    "bare": Bare,
    "bare first": lambda: nn.Sequential(nn.Sequential(Bare(), nn.ReLU()), nn.Linear(2, 2)),
    "deep": lambda: deep(40),
}


def deep(levels: int) -> nn.Module:
    found: nn.Module = nn.Linear(2, 2)
    for _ in range(levels):
        found = nn.Sequential(found)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_first_parameter_is_that_of_torchs_own_walk(name: str) -> None:
    model = MODELS[name]()
    assert first_parameter(model) is next(model.parameters(), None)


@pytest.mark.parametrize("name", ["linear", "nested", "bare first", "deep"])
def test_a_walk_is_that_of_torch(name: str) -> None:
    model = MODELS[name]()
    found = walk(model)
    assert [(path, id(one)) for path, one in found] == [
        (path, id(one)) for path, one in model.named_modules()
    ]
    found[-1][1].eval()
    assert training_modes(found) == tuple(in_training(module) for _, module in found)


def test_the_storages_of_several_are_those_of_each() -> None:
    x = torch.ones(3, 2)
    tensors = [x, x[1:], x.t(), x.clone()]
    assert storages_of(tensors) == [storage_of(tensor) for tensor in tensors]
    assert len(set(storages_of(tensors))) == 2


def freeze(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_(False)


def replace(model: nn.Sequential) -> None:
    model[0] = nn.Linear(5, 6).double()


def extend(model: nn.Sequential) -> None:
    model.append(nn.Linear(3, 3).double())


def track(model: nn.Sequential) -> None:
    model[1] = nn.BatchNorm1d(6).double()


def evaluate(model: nn.Sequential) -> None:
    model[3].eval()


def clip(model: nn.Sequential) -> None:
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def halve(model: nn.Sequential) -> None:
    def hook(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output / 2

    model[0].register_forward_hook(hook)


@pytest.mark.parametrize(
    "change", [freeze, replace, extend, track, evaluate, clip, halve], ids=lambda f: f.__name__
)
def test_a_step_finds_what_was_changed_after_several(
    change: Callable[[nn.Sequential], None],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 6), nn.Identity(), nn.Tanh(), nn.Dropout(0.0), nn.Linear(6, 3)
    ).double()
    x, y = torch.randn(10, 5).double(), torch.randint(3, (10,))
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    for _ in range(3):
        engine.backward(x, y)
    change(model)
    model.zero_grad()
    full = copy_of(model)
    if change is clip:  # a copy has no hooks of parameters
        clip(full)
    expected = F.cross_entropy(full(x), y)
    expected.backward()
    found = engine.backward(x, y)
    assert_exact(state_of(model, found), state_of(full, expected))


@pytest.mark.parametrize("torch_s", [True, False])
def test_a_checkpoint_that_an_error_has_left_is_ended(
    torch_s: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch, or by one that ends it once its frame is forgotten, as torch 2.11 does."""

    def fail(_: Tensor) -> Tensor:
        raise ZeroDivisionError

    def saving() -> Iterator[None]:
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            yield

    def late(run: Callable[[Tensor], Tensor], x: Tensor, **_: bool) -> None:
        gen = saving()
        next(gen)
        run(x)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return (checkpoint if torch_s else late)(fail, x, use_reentrant=False)

    if not torch_s:
        monkeypatch.setattr(modules, "CHECKPOINT", late.__code__)
    with pytest.raises(ZeroDivisionError) as raised:
        call_model(Model(), torch.ones(1, requires_grad=True))
    assert raised.value.__traceback__ is not None  # the frames are there yet
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
