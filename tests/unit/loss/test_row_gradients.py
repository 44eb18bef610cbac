"""Gradients of logits where these are: those of torch's cross-entropy, for any values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from anybatch.loss.row_gradients import CrossEntropy

INF, C, V = float("inf"), 5, 7


def drawn(change: dict[tuple[int, int], float]) -> Tensor:
    z = torch.linspace(0, 40, C * V).sin().mul(3).view(C, V).double()
    for place, value in change.items():
        z[place] = value
    return z


CASES: dict[str, tuple[Tensor, list[int]]] = {
    "usual": (drawn({}), [0, 1, 2, 3, 6]),
    "some ignored": (drawn({}), [0, -100, 2, -100, 6]),
    "all ignored": (drawn({}), [-100] * C),
    "far apart": (drawn({(0, 3): 1e4, (1, 2): -1e4, (2, 2): 800.0}), [0, 1, 2, 3, 6]),
    "a target far above": (drawn({(0, 0): 1e8, (0, 1): 1e8 - 1, (2, 2): 800.0}), [0, 1, 2, 3, 6]),
    "a class that is out": (drawn({(0, 3): -INF, (1, 2): -INF}), [0, 1, 2, 3, 6]),
    "a target that is out": (drawn({(0, 0): -INF}), [0, 1, 2, 3, 6]),
    "an ignored row without its first class": (drawn({(1, 0): -INF}), [0, -100, 2, 3, 6]),
    "a row that is no number": (drawn({(3, 1): float("nan")}), [0, 1, 2, 3, 6]),
    "an ignored row that is no number": (drawn({(3, 1): float("nan")}), [0, 1, 2, -100, 6]),
    "one without end": (drawn({(3, 1): INF}), [0, 1, 2, 3, 6]),
}


@pytest.mark.parametrize("above", [[1.0] * C, [0.5, -2.0, 0.0, 1.0, 3.0]], ids=["sum", "weighed"])
@pytest.mark.parametrize(
    "weight", [None, torch.linspace(0, 3, V).double()], ids=["plain", "weight"]
)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_torch(
    case: str, weight: Tensor | None, above: list[float]
) -> None:
    z, classes = CASES[case]
    y, each = torch.tensor(classes), torch.tensor(above).double()
    leaf = z.clone().requires_grad_()
    want = F.cross_entropy(leaf, y, weight=weight, reduction="none")
    (gradient,) = torch.autograd.grad(want, leaf, each)
    own = z.clone()
    found, backward = CrossEntropy(F.cross_entropy, -100, weight).differentiated(own, y)
    torch.testing.assert_close(found, want.detach(), rtol=1e-13, atol=1e-13, equal_nan=True)
    result = backward(each)
    torch.testing.assert_close(result, gradient, rtol=1e-13, atol=1e-13, equal_nan=True)
    assert result.data_ptr() == own.data_ptr()


@pytest.mark.parametrize("wrong", [-1, V])
def test_a_class_that_is_none_is_refused(wrong: int) -> None:
    y = torch.tensor([0, wrong, 1, 2, 3])
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        CrossEntropy(F.cross_entropy, -100, None).differentiated(drawn({}), y)
