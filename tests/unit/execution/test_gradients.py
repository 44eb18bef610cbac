from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from anybatch.execution.gradients import Gradients, gradient_dtype, run_backward


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


def sparse(values: float, dtype: torch.dtype) -> torch.Tensor:
    dense = torch.zeros(4, 3, dtype=dtype)
    dense[1:3] = values
    return dense.to_sparse(1)


KINDS = {
    "dense": lambda v, dtype: torch.full((4, 3), v, dtype=dtype),
    "expanded": lambda v, dtype: torch.full((3,), v, dtype=dtype).expand(4, 3),
    "sparse": sparse,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("new", KINDS)
@pytest.mark.parametrize("old", [*KINDS, None])
def test_gradients_of_every_layout_add_up_in_any_order(
    old: str | None, new: str, factor: float, dtype: torch.dtype
) -> None:
    """Delivery raised halfway: sparse + dense, expanded ``.grad``, sparse bfloat16 twice."""
    p, plain = nn.Parameter(torch.zeros(4, 3, dtype=dtype)), nn.Parameter(torch.zeros(2))
    plain.grad = torch.ones(2)
    p.grad = None if old is None else KINDS[old](1.0, dtype)
    before = p.grad
    gradients = Gradients([plain, p])
    gradients.set_aside()
    plain.grad = torch.full((2,), 2.0)
    for _ in range(2):
        gradient = KINDS[new](2.0, dtype)
        if p.grad is None:
            p.grad = gradient.clone() if new == "sparse" else gradient.contiguous()
        else:
            p.grad = p.grad + gradient
        gradients.collect()
    gradients.finish(factor)
    untouched = None if before is None else KINDS[old](1.0, dtype).to_dense()
    assert untouched is None or torch.equal(before.to_dense(), untouched), "not before delivery"
    gradients.deliver()
    want = factor * 2 * KINDS[new](2.0, dtype).to_dense()
    want = want if untouched is None else want + untouched
    assert torch.equal(p.grad.to_dense(), want)
    assert p.grad.dtype == dtype
    assert plain.grad.tolist() == [1.0 + 2.0 * factor] * 2
    if old == "dense" and new != "sparse":
        assert p.grad is before


def test_an_expanded_sum_is_delivered() -> None:
    """A hook may leave an expanded gradient; it cannot be added to in place."""
    p = parameter()
    p.grad = before = torch.ones(3)
    gradients = Gradients([p])
    gradients.set_aside()
    p.grad = torch.ones(1).expand(3)
    gradients.finish()
    gradients.deliver()
    assert p.grad.tolist() == [2.0, 2.0, 2.0]
    assert before.tolist() == [1.0, 1.0, 1.0]


def test_leaves_that_appear_late_are_summed_as_the_others() -> None:
    """A bfloat16 parameter that only the loss closes over was summed in bfloat16."""
    p, late, other = parameter(), parameter(torch.bfloat16), parameter()
    late.grad = torch.ones(3, dtype=torch.bfloat16)
    gradients = Gradients([p])
    gradients.set_aside()
    gradients.add([late, p, other, late])
    assert late.grad is None
    assert gradients.parameters == [p, late, other]
    assert gradients.half == ("bfloat16",)
    for _ in range(1000):
        late.grad = torch.full((3,), 0.01, dtype=torch.bfloat16)
        gradients.collect()
    gradients.finish()
    gradients.deliver()
    exact = 1.0 + 1000 * float(torch.tensor(0.01, dtype=torch.bfloat16))
    assert float(late.grad[0]) == float(torch.tensor(exact, dtype=torch.bfloat16))
    assert p.grad is None
    assert not Gradients([p], wide=False)._half


def test_a_step_that_starts_over_keeps_nothing_of_its_first_try() -> None:
    p, half = parameter(), parameter(torch.bfloat16)
    p.grad, half.grad = torch.ones(3), torch.ones(3, dtype=torch.bfloat16)
    gradients = Gradients([p, half])
    gradients.set_aside()
    for value in (5.0, 2.0):
        gradients.restart()
        assert p.grad is None
        p.grad, half.grad = torch.full((3,), value), torch.full((3,), value).bfloat16()
        gradients.collect()
        gradients.finish()
        if value == 5.0:
            half.grad = torch.zeros(3).bfloat16()
    gradients.deliver()
    assert p.grad.tolist() == [3.0, 3.0, 3.0]
    assert half.grad.tolist() == [3.0, 3.0, 3.0]


def trained(in_accumulator: bool, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """The gradients of three micro-batches; one parameter is used by the second only."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    sometimes, never = parameter(dtype), parameter(dtype)
    parameters = [*model.parameters(), sometimes, never]
    gradients = Gradients(parameters, wide=False, accumulator=in_accumulator)
    gradients.set_aside()
    for index in range(3):
        out = model(torch.randn(4, 5, dtype=dtype))
        (out * (sometimes if index == 1 else 1.0)).square().sum().backward()
        gradients.collect()
        assert not in_accumulator or all(p.grad is None for p in parameters)
    gradients.finish()
    gradients.deliver()
    return [p.grad for p in parameters]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_in_an_accumulator_are_bit_for_bit_those_in_place(dtype: torch.dtype) -> None:
    for mine, theirs in zip(trained(True, dtype), trained(False, dtype), strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)


def test_a_failed_backward_loses_its_micro_batch_only() -> None:
    p, half = parameter(), parameter(torch.bfloat16)
    p.grad = torch.ones(3)
    gradients = Gradients([p, half], accumulator=True)
    assert gradients.accumulator
    gradients.set_aside()
    for value in (2.0, 3.0):
        p.grad, half.grad = torch.full((3,), value), torch.full((3,), value).bfloat16()
        gradients.collect()
        p.grad = torch.full((3,), 100.0)  # and half had no gradient yet when it failed
        gradients.drop()
        assert p.grad is None
    gradients.finish(2.0)
    gradients.deliver()
    assert p.grad.tolist() == [11.0, 11.0, 11.0]
    assert half.grad.tolist() == [10.0, 10.0, 10.0]


def test_sums_are_in_an_accumulator_where_all_of_them_are() -> None:
    p, half = parameter(), parameter(torch.bfloat16)
    assert Gradients([half]).accumulator
    assert not Gradients([p, half]).accumulator
    assert not Gradients([half], wide=False).accumulator
    assert Gradients([p, half], wide=False, accumulator=True).accumulator


def test_a_batch_that_is_divided_after_all() -> None:
    p, half = parameter(), parameter(torch.bfloat16)
    gradients = Gradients([p, half], wide=False)
    assert gradients.half == ()
    gradients.divide(accumulator=False)
    assert (gradients.half, gradients.accumulator) == (("bfloat16",), False)
    gradients.divide(accumulator=True)
    assert gradients.accumulator


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_gradients_of_every_layout_are_summed_in_an_accumulator(
    first: str, second: str, dtype: torch.dtype
) -> None:
    p = nn.Parameter(torch.zeros(4, 3, dtype=dtype))
    gradients = Gradients([p], accumulator=True)
    for variant, value in ((first, 1.0), (second, 2.0), (first, 4.0)):
        p.grad = KINDS[variant](value, dtype)
        gradients.collect()
    gradients.finish()
    gradients.deliver()
    ones = {variant: KINDS[variant](1.0, dtype).to_dense() for variant in (first, second)}
    assert torch.equal(p.grad.to_dense(), 5.0 * ones[first] + 2.0 * ones[second])
    assert p.grad.dtype == dtype


@pytest.mark.parametrize("in_accumulator", [False, True])
def test_gradients_that_torch_lays_in_one_place_are_summed_each_by_itself(
    *, in_accumulator: bool
) -> None:
    """The leaves of a sum of views get views of one gradient, and a loop by hand adds to both."""
    torch.manual_seed(1)
    a, b = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(3, 2))
    gradients, want = Gradients([a, b], accumulator=in_accumulator), torch.zeros(6)
    for k in range(1, 4):
        weight = k * torch.arange(6.0)
        ((a.view(-1) + b.view(-1)) * weight).sum().backward()
        gradients.collect()
        want += weight
    gradients.finish()
    gradients.deliver()
    assert a.grad is not None
    assert b.grad is not None
    assert torch.equal(a.grad.view(-1), want)
    assert torch.equal(b.grad.view(-1), want)


class Subclass(Tensor):
    pass


class Noticed(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


def _roots() -> tuple[Tensor, list[Tensor], list[Tensor]]:
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    roots = [weight.square().sum(), weight.sum()]
    return weight, roots, [torch.tensor(0.5), torch.tensor(4.0)]


@pytest.mark.parametrize("notices", ["nothing", "a mode", "a tool", "inputs", "a subclass"])
def test_a_backward_is_torchs_own_where_something_notices(
    notices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, roots, gradients = _roots()
    called, torchs, mode = list[Any](), torch.autograd.backward, Noticed()

    def tool(*args: Any, **kwargs: Any) -> None:
        called.append(torchs)
        torchs(*args, **kwargs)

    if notices == "a tool":
        monkeypatch.setattr(torch.autograd, "backward", tool)
    if notices == "a subclass":
        gradients[0] = gradients[0].as_subclass(Subclass)
    with mode if notices == "a mode" else nullcontext():
        run_backward(roots, gradients, [weight] if notices == "inputs" else None)
    called += [one for one in mode.called if one is torchs]
    assert called == ([torchs] if notices in ("a mode", "a tool") else [])
    assert_close(weight.grad, torch.tensor([6.0, 7.0]), rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [torch.ones(2), torch.tensor(1j)])
def test_a_gradient_that_does_not_fit_its_root_is_refused_as_torch_does(wrong: Tensor) -> None:
    found = []
    for run in (torch.autograd.backward, partial(run_backward, inputs=None)):
        _, roots, gradients = _roots()
        with pytest.raises(RuntimeError) as error:
            run(roots, [wrong, gradients[1]])
        found.append(str(error.value))
    assert found[0] == found[1]
