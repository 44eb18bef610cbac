from __future__ import annotations

import logging
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.memory.fakes import Fakes, interrupted_between_functions, is_fake


class Holds(nn.Module):
    """Tensors everywhere: shared, as a buffer, as an attribute, and a reference to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.register_buffer("mean", torch.ones(3))
        self.plain, self.calls = torch.ones(3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.b(self.a(x)) + self.mean + self.plain
        return self.last


def test_a_copy_shares_nothing_with_the_original() -> None:
    model, fakes = Holds(), Fakes()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    copied = fakes.copy(model, model.modules())
    assert all(map(is_fake, [*copied.parameters(), *copied.buffers(), copied.plain]))
    assert copied.a.weight is copied.b.weight
    with fakes.mode:
        copied(torch.empty(2, 3)).sum().backward()
    assert copied.calls == 1
    assert (model.calls, "last" in vars(model)) == (0, False)
    assert copied.a.weight.grad is not None
    assert model.a.weight.grad is None
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_the_same_tensor_is_always_the_same_fake() -> None:
    fakes, tensor = Fakes(), torch.ones(3)
    assert fakes.of(tensor) is fakes.of(tensor)
    assert fakes.of(torch.ones(3)) is not fakes.of(torch.ones(3))


def test_rows_are_made_anew_and_what_is_no_tensor_is_repeated() -> None:
    batch = {
        "x": torch.ones(4, 5),
        "names": ["a", "b", "c", "d"],
        "array": np.arange(4),
        "scalar": torch.tensor(1.0),
        "flag": True,
    }
    fakes = Fakes()
    found = fakes.rows(batch, 4, 6)
    assert is_fake(found["x"])
    assert found["x"].shape == (6, 5)
    assert found["names"] == ["a", "b", "c", "d", "a", "b"]
    assert found["array"].tolist() == [0, 1, 2, 3, 0, 1]
    assert found["scalar"].shape == ()
    assert found["flag"] is True


def test_an_optimizer_that_is_torchs_own_is_copied_unstepped_and_others_are_not() -> None:
    model, fakes = nn.Linear(3, 3), Fakes()
    real = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    real.step()
    schedule = torch.optim.lr_scheduler.StepLR(real, 1)
    called: list[int] = []
    real.register_step_pre_hook(lambda *_: called.append(1))
    twin = fakes.optimizer(real)
    assert twin is not None
    assert not twin.state
    assert all(map(is_fake, twin.param_groups[0]["params"]))
    with fakes.mode:
        for p in twin.param_groups[0]["params"]:
            p.grad = torch.empty_like(p)
        type(twin).step(twin)
    assert called == []
    assert len(real.state) == 2
    assert schedule.last_epoch == 0

    class Own(torch.optim.SGD):
        pass

    assert fakes.optimizer(Own(model.parameters())) is None


def test_a_model_that_keeps_a_result_is_copied_without_a_warning() -> None:  # which is an error
    model, fakes = Holds(), Fakes()
    model(torch.ones(2, 3))
    model.several = [model.last * 2]
    copied = fakes.copy(model, model.modules())
    assert all(map(is_fake, [copied.last, *copied.several]))


class LineHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_torch_reports_no_kernel_that_needs_data() -> None:
    """It printed 20 frames for every kernel of a mixture of experts."""
    fakes, handler = Fakes(), LineHandler()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        with fakes.entered(), pytest.raises(RuntimeError):
            torch.mm(fakes.of(torch.zeros(2, 3)), fakes.of(torch.zeros(2, 3)))
        assert not handler.lines
        with fakes.mode, pytest.raises(RuntimeError):
            torch.mm(fakes.of(torch.zeros(2, 3)), fakes.of(torch.zeros(2, 3)))
        assert handler.lines
    finally:
        logger.removeHandler(handler)


class Interrupts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends a signal while a kernel asks a fake for its device: what is raised there is fatal."""

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            signal.raise_signal(signal.SIGINT)
        return func(*args, **(kwargs or {}))


def relu_and_sin(x: Tensor, called: list[Any]) -> None:
    with interrupted_between_functions(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        for function in (torch.relu, torch.sin):
            with Interrupts():  # type: ignore[no-untyped-call]
                function(fake)
                called.append(function)


def test_ctrl_c_is_raised_between_functions_of_fakes() -> None:
    called, before = list[Any](), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        relu_and_sin(torch.randn(3, 4, requires_grad=True), called)
    assert called == [torch.relu]
    assert signal.getsignal(signal.SIGINT) is before
