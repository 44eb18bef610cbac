"""Quiet: parts in which no loss is taken are found, run unheard, and leave no hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch.loss.model_trace import Quiet, TracingMode


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.criterion = nn.Linear(3, 4), nn.CrossEntropyLoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.criterion(self.body(x), y)
        return loss


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(3, 3), Inner()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.inner(self.before(x), y)
        return loss


X, Y = torch.randn(5, 3), torch.randint(4, (5,))


def calls(model: nn.Module, quiet: Quiet) -> tuple[list[str], Any]:
    """Return the functions that were heard, and what the loss is made of."""
    names: list[str] = []

    class Noting(TracingMode):
        def __torch_function__(self, func: Any, *others: Any) -> Any:
            names.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, *others)

    noting = Noting(((X, Y), {}))
    with quiet.around(noting):
        loss = model(X, Y)
    return names, noting.combination(loss)


def test_what_takes_no_loss_is_not_traced_again() -> None:
    model = Outer()
    quiet = Quiet(model)
    recorded = [calls(model, quiet) for _ in range(4)]
    assert [names.count("linear") for names, _ in recorded] == [2, 1, 0, 0]
    assert all(found is not None and found[0][1].name == "cross_entropy" for _, found in recorded)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_error_in_a_quiet_part_leaves_no_mode() -> None:
    model = Outer()
    quiet = Quiet(model)
    calls(model, quiet)
    with pytest.raises(RuntimeError, match="shapes"), quiet.around(TracingMode(((X, Y), {}))):
        model(torch.randn(5, 4), Y)
    assert torch.overrides._get_current_function_mode() is None  # type: ignore[no-untyped-call]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_it_can_be_set_to_trace_everywhere() -> None:
    model = Outer()
    quiet = Quiet(model)
    calls(model, quiet)
    quiet.forget()
    names, _ = calls(model, quiet)
    assert names.count("linear") == 2
