from __future__ import annotations

import pytest
import torch

from anybatch.execution.full_batch_rng.kernels import (
    CATEGORY,
    FORMS,
    Draw,
    Law,
    RowRange,
    category_of,
    fault_of,
    largest_draw,
)
from anybatch.execution.full_batch_rng.law import fitted, pattern_of

aten = torch.ops.aten
CALLS = [
    (aten.bernoulli_.float, lambda n: (torch.zeros(n, 5), 0.4)),
    (aten.bernoulli_.Tensor, lambda n: (torch.zeros(n, 5), torch.full((n, 1), 0.4))),
    (aten.uniform_.default, lambda n: (torch.zeros(5, n).T, -1.0, 2.0)),
    (aten.normal_.default, lambda n: (torch.zeros(n, 5), 0.0, 1.0)),
    (aten.normal_.default, lambda n: (torch.zeros(n, 10)[:, ::2], 0.0, 1.0)),
    (aten.exponential_.default, lambda n: (torch.zeros(n, 5), 1.0)),
    (aten.rand.default, lambda n: ([n, 5],)),
    (aten.randn.default, lambda n: ([n, 5],)),
    (aten.randint.low, lambda n: (2, 9, [n, 5])),
    (aten.rand_like.default, lambda n: (torch.zeros(5, n).T,)),
    (aten.bernoulli.default, lambda n: (torch.full((n, 5), 0.4),)),
    (aten.multinomial.default, lambda n: (torch.ones(n, 5), 2)),
    (aten.multinomial.default, lambda n: (torch.ones(n, 5), 20, True)),
    (aten.normal.Tensor_Tensor, lambda n: (torch.zeros(n, 1), torch.ones(5))),
    (aten.normal.float_Tensor, lambda n: (0.0, torch.ones(n, 5))),
    (aten.normal.float_float, lambda n: (0.0, 1.0, [n, 5])),
    (aten.native_dropout.default, lambda n: (torch.ones(n, 5), 0.4, True)),
]


@pytest.mark.parametrize(("func", "args"), CALLS, ids=[str(func) for func, _ in CALLS])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_the_rows_of_a_draw_are_those_of_the_draw_of_all(
    func: object, args: object, size: int
) -> None:
    def draw(n: int) -> Draw:
        return Draw(func, args(n), {}, category_of(func))

    law = fitted([draw(n).pattern for n in (4, 2, 3)], (4, 2, 3))
    torch.manual_seed(1)
    every = draw(23).plain()
    after = torch.get_rng_state()
    rows = RowRange(9, size, 23)
    torch.manual_seed(1)
    mine = draw(size)
    found = mine.draw_full(law, law.full_pattern(mine.pattern, rows), rows)
    assert torch.equal(torch.get_rng_state(), after)
    pairs = zip(found, every, strict=True) if isinstance(found, tuple) else [(found, every)]
    for few, all_rows in pairs:
        assert few.dtype == all_rows.dtype
        assert torch.equal(few, all_rows[9 : 9 + size])
        if size > 1:
            natural = draw(size).plain()
            natural = natural[0] if isinstance(natural, tuple) else natural
            assert few.stride() == natural.stride()
        if few is not mine.args[0]:
            assert few.untyped_storage().nbytes() == few.numel() * few.element_size()


def test_every_kernel_that_draws_is_recognised_or_watched() -> None:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    for name in names:
        base, _, overload = name.removeprefix("aten::").partition(".")
        try:
            func = getattr(getattr(aten, base), overload or "default")
        except (AttributeError, RuntimeError):
            continue
        if torch.Tag.nondeterministic_seeded in func.tags:
            assert category_of(func), name
        elif "rnn" not in name:
            assert not category_of(func), name


def test_what_writes_to_a_passed_tensor_is_not_recognised() -> None:
    assert category_of(aten.rand.out) == category_of(aten.normal.out) == "unknown"
    assert category_of(aten.bernoulli_.float) == "written"
    assert category_of(aten.normal.float_float) == "sized"
    assert category_of(aten.mul.Tensor) == ""
    assert set(FORMS) <= set(CATEGORY.values())


def test_what_cannot_be_drawn_in_parts() -> None:
    assert fault_of("multinomial", Law(1), 2) == "it chooses among the samples"
    assert fault_of("multinomial", Law(0), 2) is None
    assert fault_of("randperm", Law(None), 1) is None
    assert "values of others" in str(fault_of("poisson", Law(0), 2))


def test_dropout_that_drops_nothing_is_idle() -> None:
    x = torch.ones(3)
    category = category_of(aten.native_dropout.default)
    assert Draw(aten.native_dropout.default, (x, 0.0, True), {}, category).idle
    assert Draw(aten.native_dropout.default, (x, 0.5, False), {}, category).idle
    assert not Draw(aten.native_dropout.default, (x, 0.5, True), {}, category).idle
    assert pattern_of(x) == Draw(aten.native_dropout.default, (x, 0.5, True), {}, category).pattern


def test_the_bytes_of_the_largest_draw_are_those_of_a_line() -> None:
    assert largest_draw([[16, 40, 8], [24, 40, 12]], [2, 3], 100) == 24 + 97 * 8
    assert largest_draw([[40], [40]], [2, 3], 100) == 0
    assert largest_draw([[16], [24, 8]], [2, 3], 100) == 800
    assert largest_draw([[]], [1], 100) == 0
