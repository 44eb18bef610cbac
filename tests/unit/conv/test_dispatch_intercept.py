"""torch's kernels of convolutions are replaced whole or not at all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.unit.conv.problems import problem
from torch import nn
from torch.library import Library
from torch.nn import functional as F

from anybatch.conv import dispatch
from anybatch.conv.dispatch import KernelRecorder, intercepted, kernels_of, sizes_of


@pytest.fixture(autouse=True)
def _torchs_own() -> None:
    """Engines of earlier tests in this process leave torch's kernels replaced."""
    installed = dispatch._INSTALLED
    assert not installed.entered
    installed._staying.clear()
    while installed._libraries:
        installed._libraries.popitem()[1][1]._destroy()


def step() -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    y = F.conv2d(x, w)
    y.square().sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return [y.detach(), x.grad, w.grad]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(a, b, strict=True))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 1])
def test_what_fails_while_the_second_kernel_is_replaced_leaves_torch_as_it_was(
    at: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    impl: Any = Library.impl

    def fails(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == at + 1:
            raise error
        return impl(self, *args, **options)

    want, requested = step(), []
    with monkeypatch.context() as patch:
        patch.setattr(Library, "impl", fails)
        with pytest.raises(error), intercepted("cpu", lambda *_: None):
            pass
    assert same(step(), want)
    with intercepted("cpu", lambda problem, *_: requested.append(problem.kernel)):
        assert same(step(), want)
    assert requested == ["forward", "data", "filter"]
    assert same(step(), want)


def test_a_warning_while_a_kernel_is_replaced_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns where the device has a kernel of its own, as CUDA has for the backward pass."""
    impl: Any = Library.impl

    def warns(self: Any, *args: Any, **options: Any) -> Any:
        warnings.warn("another kernel is there", stacklevel=2)
        return impl(self, *args, **options)

    monkeypatch.setattr(Library, "impl", warns)
    want = step()
    with intercepted("cpu", lambda *_: None):
        assert same(step(), want)


def test_kernels_are_recorded_with_their_layers_and_sizes() -> None:
    layers = nn.Conv1d(2, 8, 31, padding=15), nn.ReLU(), nn.Conv1d(8, 8, 63, 2, 31, groups=8)
    model, x = nn.Sequential(*layers), torch.randn(4, 2, 200)
    with KernelRecorder(model) as recorder:
        model(x).sum().backward()
    keys = list(recorder.keys)
    assert [(p.kernel, size) for p, size in keys] == [
        ("forward", 4),
        ("forward", 4),
        ("data", 4),
        ("filter", 4),
        ("filter", 4),
    ]
    assert [recorder.layers(p) for p, _ in keys] == [["0"], ["2"], ["2"], ["2"], ["0"]]
    assert recorder.layers(problem("forward", 2, "plain")) == []
    assert kernels_of("aten::mm", ()) == []
    assert sizes_of(100, 32) == [32, 4]
    assert sizes_of(8, 32) == [8]
