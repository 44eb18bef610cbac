"""What people write from habit is understood, or refused in one sentence with the line to write."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.errors import BatchError, LossError

X, Y = torch.randn(12, 8), torch.randint(3, (12,))
PACKAGE = str(Path(anybatch.__file__).parent)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def engine(loss: Any = F.cross_entropy, **named: Any) -> Engine:
    return Engine(net(), loss, **({"micro_batch": 4} | named))


def untyped() -> Any:
    return engine()


class Failing(nn.Module):
    """Fails as the models of users do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def of_three(model: Any, outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y) + 0 * model


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a loss, as accelerate takes it": (
        lambda: engine().backward(F.cross_entropy(net()(X), Y)),
        BatchError,
        r"calls the model and the loss itself.*engine.backward\(inputs, targets\)",
    ),
    "one tuple": (
        lambda: engine().backward((X, Y)),
        BatchError,
        r"Sequential.forward\(input\) was called with 2 arguments.*engine.backward\(\*batch\)",
    ),
    "one mapping": (
        lambda: engine().backward({"input": X, "y": Y}),
        BatchError,
        r"called with input=..., y=...: select what it takes, and pass .* as targets",
    ),
    "too few inputs": (
        lambda: Engine(nn.Bilinear(8, 8, 3), F.cross_entropy, micro_batch=4).backward(X, Y),
        BatchError,
        r"called with 1 argument: put several inputs into a tuple: engine.backward\(\(a, b\)",
    ),
    "numpy": (
        lambda: engine().backward(X.numpy(), Y),
        BatchError,
        r"inputs is a numpy array: pass torch.from_numpy\(inputs\)",
    ),
    "no targets": (
        lambda: engine().backward(X),
        LossError,
        r"called as loss_fn\(outputs\).*cross_entropy\(.* takes others: pass targets",
    ),
    "a loss of other arguments": (
        lambda: engine(of_three).backward(X, Y),
        LossError,
        r"loss_fn\(outputs, targets\).*of_three\(model.* takes others: close over",
    ),
    "a call": (lambda: engine()(X), TypeError, r"no model.*engine.model\(inputs\) returns outputs"),
    "a step": (
        lambda: engine().step(),
        AttributeError,
        r"the optimizer is your own: optimizer.step",
    ),  # type: ignore[attr-defined]
    "a mode": (lambda: engine().train(), AttributeError, r"your own: engine.model.train"),  # type: ignore[attr-defined]
    "a size in words": (
        lambda: engine(micro_batch="auto"),
        ValueError,
        r'whole number >= 1, and it is \'auto\': leave it out and give memory="6GiB"',
    ),
    "half a unit": (
        lambda: engine(memory="6G", micro_batch=None),
        ValueError,
        r'it is \'6G\': write "6GiB".*or "6GB"',
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_one_sentence_with_the_line_to_write(name: str) -> None:
    call, kind, match = WRONG[name]
    with pytest.raises(kind, match=match) as refused:
        call()
    assert "\n" not in str(refused.value)
    assert not own_frames(refused.value)[3:]


def own_frames(error: BaseException) -> list[str]:
    """Return the functions of the package in the printed error, causes included."""
    frames = [frame for one in (error, error.__cause__) if one for frame in walked(one)]
    return [frame.name for frame in frames if frame.filename.startswith(PACKAGE)]


def walked(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def test_an_error_in_the_model_is_shown_where_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        Engine(Failing(), F.cross_entropy, micro_batch=4).backward(X, Y)
    assert own_frames(raised.value) == ["backward"]
    assert "forward" in [frame.name for frame in walked(raised.value) if frame.filename == __file__]


def test_an_error_in_the_loss_is_shown_where_it_is() -> None:
    def loss(_: Tensor, y: Tensor) -> Tensor:
        raise ZeroDivisionError(len(y))

    with pytest.raises(ZeroDivisionError) as raised:
        engine(loss).backward(X, Y)
    assert own_frames(raised.value) == ["backward"]
    assert walked(raised.value)[-1].name == "loss"


def test_a_type_error_inside_of_the_model_is_its_own() -> None:
    class Adding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + "1"  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand"):
        Engine(Adding(8, 3), F.cross_entropy, micro_batch=4).backward(X, Y)


def wide(a: Tensor, b: Tensor, c: Tensor, y: Tensor) -> Tensor:
    return a.sum() + b.sum() + c.sum() + y.sum() + "1"  # type: ignore[operator]


class Three(nn.Linear):
    def forward(self, x: Tensor, names: Any = None) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        out = super().forward(x)
        return out, out, out


def test_a_type_error_inside_of_a_loss_of_several_outputs_is_its_own() -> None:
    with pytest.raises(TypeError, match="unsupported operand") as raised:
        Engine(Three(8, 3), wide, micro_batch=4).backward(X, Y)
    assert type(raised.value) is TypeError


def test_an_array_beside_the_tensors_is_not_blamed_for_another_error() -> None:
    names = np.array([str(i) for i in range(len(X))])
    with pytest.raises(TypeError, match="unsupported operand") as raised:
        Engine(Three(8, 3), wide, micro_batch=4).backward((X, names), Y)
    assert type(raised.value) is TypeError


def test_all_frames_are_shown_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYBATCH_TRACEBACK", "full")
    with pytest.raises(RuntimeError) as raised:
        Engine(Failing(), F.cross_entropy, micro_batch=4).backward(X, Y)
    assert len(own_frames(raised.value)) > 5


def test_a_fault_of_the_package_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    it = engine()

    code = compile("def faulty(*_):\n    raise KeyError(1)", f"{PACKAGE}/faulty.py", "exec")
    scope: dict[str, Any] = {}
    exec(code, scope)
    monkeypatch.setattr("anybatch.engine.engine.Before", scope["faulty"])
    with pytest.raises(KeyError) as raised:
        it.backward(X, Y)
    assert len(own_frames(raised.value)) > 2


def test_the_last_step_is_a_mapping_of_numbers() -> None:
    it = engine(memory="1MiB", micro_batch=None)
    loss = it.backward(X, Y)
    assert it.last is not None
    found = dict(it.last)
    assert found == {**it.last}
    assert found["loss"] == float(loss)
    assert found["samples"] == len(X)
    assert all(isinstance(value, int | float) for value in found.values())
    with pytest.raises(KeyError):
        it.last["nothing"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_of_an_engine_trains(copied: Callable[[Engine], Engine]) -> None:
    it = engine(memory="1MiB", micro_batch=None, cache=None)
    it.backward(X, Y)
    other = copied(it)
    other.model.zero_grad()
    other.backward(X, Y)
    for a, b in zip(it.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
