"""Walks through a model, and steps on one that was changed after several steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

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
    Walked,
    call_model,
    first_parameter,
    in_training,
    once,
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


class Own(nn.Module):
    """A module of a user's with a number, a list, a tensor and a function in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.log, self.last, self.act = 2.0, [1], torch.ones(3), F.relu
        self.register_buffer("table", torch.ones(2))
        self.norm = nn.BatchNorm1d(3, track_running_stats=False)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Embedding(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x


def hooked(_module: nn.Module, *_: object) -> None:
    """Do nothing."""


CHANGES: dict[str, Callable[[Any], object]] = {
    "mode": lambda own: own.inner[0].eval(),
    "number": lambda own: setattr(own, "scale", 3.0),
    "class of a number": lambda own: setattr(own, "scale", 2),
    "number for a list": lambda own: setattr(own, "log", 1),
    "new attribute": lambda own: setattr(own, "more", 1),
    "attribute for another": lambda own: (delattr(own, "act"), setattr(own, "other", F.relu)),
    "deleted number": lambda own: delattr(own, "scale"),
    "setting of torch's": lambda own: setattr(own.inner[1], "max_norm", 1.0),
    "child": lambda own: setattr(own, "norm", nn.BatchNorm1d(3)),
    "child of a leaf": lambda own: own.inner[0].add_module("more", nn.Tanh()),
    "order of children": lambda own: own.inner.insert(0, own.inner.pop(1)),
    "name of a child": lambda own: (
        own.inner.add_module("2", own.inner[0]),
        own.inner._modules.pop("0"),
    ),
    "buffer": lambda own: own.register_buffer("second", None),
    "running mean": lambda own: setattr(own.norm, "running_mean", torch.zeros(3)),
    "class": lambda own: setattr(own.inner[0], "__class__", nn.Bilinear),
    "forward of an instance": lambda own: setattr(own.inner[0], "forward", F.relu),
    "hook": lambda own: own.inner[0].register_forward_hook(hooked),
    "hook of backward": lambda own: own.register_full_backward_hook(hooked),
}


@pytest.mark.parametrize("change", CHANGES)
def test_modules_are_walked_again_after_any_change(change: str) -> None:
    own = Own()
    walked = Walked(walk(own))
    assert walked.unchanged()
    own.log.append(2)
    own.last, own.table = torch.zeros(3), torch.zeros(2)
    assert walked.unchanged()  # what a question reads of these, it reads in every step
    CHANGES[change](own)
    assert not walked.unchanged()


def test_another_forward_of_a_class_is_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    walked = Walked(walk(Own()))
    monkeypatch.setattr(Own, "forward", hooked)
    assert not walked.unchanged()


def test_a_walk_holds_no_tensor_that_a_module_stores() -> None:
    own = Own()
    held = ref(own.last)
    walked = Walked(walk(own))
    own.last = torch.zeros(3)
    assert held() is None
    assert walked.unchanged()


def test_a_question_is_asked_again_of_changed_modules_only() -> None:
    own, asked = Own(), list[int]()

    def question(modules: modules.Modules) -> int:
        asked.append(len(modules))
        return len(asked)

    walked = Walked(walk(own))
    assert [once(question, walked), once(question, walked), once(question, list(walked))] == [
        1,
        1,
        2,
    ]


class Computed(nn.Linear):
    @property
    def training(self) -> bool:
        return bool(self.count % 2)

    @training.setter
    def training(self, _: bool) -> None:
        self.__dict__["count"] = 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript
@pytest.mark.parametrize("make", [Computed, lambda *n: torch.jit.script(nn.Linear(*n))])
def test_a_module_that_computes_its_mode_is_walked_in_every_step(make: Any) -> None:
    assert not Walked(walk(make(2, 2))).unchanged()


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
