from __future__ import annotations

import pytest
import torch
from torch import nn

from anybatch.gradients import Gradients, gradient_dtype


def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(3, dtype=dtype))


def test_float32_accumulates_in_place_by_autograd_itself() -> None:
    p = parameter()
    gradients = Gradients([p])
    gradients.set_aside()
    for _ in range(3):
        (p.sum() * 2).backward()
        gradients.collect()
    left = p.grad
    gradients.finish()
    gradients.deliver()
    assert p.grad is left
    assert p.grad.tolist() == [6.0, 6.0, 6.0]


def test_half_precision_is_summed_in_float32_and_cast_once() -> None:
    p = parameter(torch.bfloat16)
    gradients = Gradients([p])
    for _ in range(1000):
        p.grad = torch.full_like(p, 0.01)
        gradients.collect()
        assert p.grad is None
    gradients.finish()
    gradients.deliver()
    assert p.grad.dtype == torch.bfloat16
    exact = 1000 * float(torch.tensor(0.01, dtype=torch.bfloat16))
    assert float(p.grad[0]) == float(torch.tensor(exact, dtype=torch.bfloat16))


def test_half_precision_gradients_that_were_there_are_rounded_once() -> None:
    p = parameter(torch.float16)
    p.grad = old = torch.full_like(p, 2048.0)
    gradients = Gradients([p])
    gradients.set_aside()
    for _ in range(4):
        p.grad = torch.full_like(p, 0.5)
        gradients.collect()
    gradients.finish()
    gradients.deliver()
    assert p.grad is old
    assert float(old[0]) == 2050.0, "2048 + 0.5 four times, one by one, would stay 2048"


def test_a_factor_is_applied_to_the_sum_and_not_to_what_was_there() -> None:
    p = parameter()
    p.grad = torch.ones(3)
    gradients = Gradients([p])
    gradients.set_aside()
    p.grad = torch.full((3,), 4.0)
    gradients.finish(0.25)
    gradients.deliver()
    assert p.grad.tolist() == [2.0, 2.0, 2.0]


def test_nothing_there_and_nothing_new_stays_none() -> None:
    p, q = parameter(), parameter()
    q.grad = torch.ones(3)
    gradients = Gradients([p, q])
    gradients.set_aside()
    gradients.finish()
    gradients.deliver()
    assert p.grad is None
    assert q.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
def test_a_gradient_dtype_that_the_person_set_is_delivered() -> None:
    p = parameter(torch.bfloat16)
    p.grad_dtype = torch.float32
    assert gradient_dtype(p) == torch.float32
    gradients = Gradients([p])
    for _ in range(3):
        (p.float() * 0.3).sum().backward()
        gradients.collect()
    gradients.finish()
    gradients.deliver()
    assert p.grad.dtype == torch.float32
