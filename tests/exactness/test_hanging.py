"""Attributes and classes of tensors: their rows do not have them, so the plan doubts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, copy_of, state_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from anybatch import Engine, LazyBatch, Loss
from anybatch.errors import LossError

N = 14


class Marked(Tensor):
    """Tensors of a class of a person's own."""


class Held(Tensor):
    """Rows of it have its attributes."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(found, Held) and args and isinstance(args[0], Held):
            found.__dict__.update(args[0].__dict__)
        return found


class Model(nn.Module):
    """Does something to its outputs."""

    def __init__(self, do: Callable[[Tensor, Tensor], Any] = lambda out, _: out) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 3).double()
        self.do = do

    def forward(self, x: Tensor) -> Any:
        return self.do(self.linear(x), x)


@dataclass
class Out:
    """Outputs in a container."""

    out: Tensor


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return tuple(torch.randn(N, k, generator=draw).double() for k in (6, 3))  # type: ignore[return-value]


def hung(name: str, value: Any, *, of_mean: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    def do(out: Tensor, _: Tensor) -> Tensor:
        setattr(out, name, out.square().mean() if of_mean else value)
        return out

    return do


def in_container(out: Tensor, _: Tensor) -> Out:
    found = Out(out)
    found.aux = 2.0  # type: ignore[attr-defined]
    return found


def with_aux(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, y) + getattr(out, "aux", 0.0)


def unchanged(out: Tensor, _: Tensor) -> Tensor:
    return out


def of_container(out: Out, y: Tensor) -> Tensor:
    return F.mse_loss(out.out, y) * getattr(out, "aux", 1.0)


def scaled(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean(1) * getattr(y, "scale", 1.0)


def in_tuple(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.mse_loss(out[1], y) + getattr(out[1], "aux", 0.0)


OUTPUTS: dict[str, tuple[Any, Any, str]] = {
    "tensor": (hung("aux", 0.0, of_mean=True), with_aux, "outputs has aux"),
    "number": (hung("aux", 2.0), with_aux, "outputs has aux"),
    "of a tuple": (
        lambda out, x: (out.detach(), hung("aux", 2.0)(out, x)),
        in_tuple,
        "outputs[1] has aux",
    ),
    "of a container": (in_container, of_container, "outputs has aux"),
    "class": (
        lambda out, _: out.as_subclass(Marked),
        lambda out, y: F.mse_loss(out, y) * (2 if isinstance(out, Marked) else 1),
        "outputs has the class Marked",
    ),
}

BATCHES: dict[str, tuple[Any, Any, str]] = {
    "input": (lambda out, x: out * getattr(x, "scale", 1.0), F.mse_loss, "inputs has scale"),
    "target": (unchanged, lambda out, y: scaled(out, y).mean(), "targets has scale"),
    "target of a declared loss": (unchanged, Loss.per_sample(scaled), "targets has scale"),
}


def doubt_after(engine: Engine, *batch: Any) -> str:
    engine.backward(*batch)
    assert engine.plan is not None
    return "" if engine.plan.exact else engine.plan.exact.by


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("case", OUTPUTS)
def test_what_hangs_on_an_output_is_not_shown(case: str, micro_batch: int) -> None:
    do, loss, why = OUTPUTS[case]
    engine = Engine(Model(do), loss, micro_batch=micro_batch)
    assert [why in doubt_after(engine, *data()) for _ in range(3)] == [True] * 3


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("case", BATCHES)
def test_what_hangs_on_a_batch_is_not_shown(case: str, micro_batch: int) -> None:
    do, loss, why = BATCHES[case]
    engine, (x, y) = Engine(Model(do), loss, micro_batch=micro_batch), data()
    assert doubt_after(engine, *data()) == doubt_after(engine, *data()) == ""
    x.scale = y.scale = 2.0  # type: ignore[attr-defined]
    assert why in doubt_after(engine, x, y)


def test_what_collate_fn_hangs_on_rows_is_not_shown() -> None:
    def marked(items: Any) -> Any:
        x, y = default_collate(items)
        y.scale = 2.0
        return x, y

    engine = Engine(Model(), F.mse_loss, micro_batch=4)
    batch = LazyBatch(list(zip(*data(), strict=True)), collate_fn=marked)  # type: ignore[arg-type]
    assert "target has scale" in doubt_after(engine, batch)


@pytest.mark.parametrize(
    ("do", "loss"),
    [
        (hung("aux", 2.0), lambda out, y: F.mse_loss(out, y) + out.aux),
        (unchanged, lambda out, y: F.mse_loss(out, y) * y.scale),
        (lambda out, x: out * x.scale, F.mse_loss),
    ],
)
def test_an_attribute_that_is_missed_is_named(do: Any, loss: Any) -> None:
    x, y = data()
    x.scale = y.scale = 2.0  # type: ignore[attr-defined]
    with pytest.raises(LossError, match=r"(aux|scale) is an attribute, which rows of a split"):
        Engine(Model(do), loss, micro_batch=4).backward(x, y)
    with pytest.raises(AttributeError):  # a mistake of another kind is as it was
        Engine(Model(), lambda out, _: out.nothing, micro_batch=4).backward(x, y)


def test_an_undivided_batch_has_its_attributes() -> None:
    do, loss, _ = OUTPUTS["tensor"]
    own, (x, y) = Model(do), data()
    truth, engine = copy_of(own), Engine(own, loss, micro_batch=N)
    assert_exact(state_of(own, engine.backward(x, y)), state_of_step(truth, loss, x, y))
    assert engine.plan is not None
    assert engine.plan.exact


def state_of_step(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    full = loss(model(x), y)
    full.backward()
    return state_of(model, full)
