"""torch's kernels of convolutions are replaced whole or not at all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.library import Library
from torch.nn import functional as F

from anybatch.conv import dispatch
from anybatch.conv.dispatch import intercepted


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
