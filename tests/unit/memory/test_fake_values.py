"""Numbers of fakes are those of the batch where they derive from it, and none elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.memory.fakes import Fakes, is_fake

imports = pytest.importorskip(
    "transformers.utils.import_utils", reason="pip install transformers is needed for these tests"
)

READS: dict[str, Any] = {"__name__": "transformers.masking_utils"}
exec("def read(x): return x.item()\ndef asks(x): return bool(x)", READS)
ROWS = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 2, 2]])  # the smallest sums first


def written(x: Tensor) -> Tensor:
    """A number of a tensor that a view of it has written to."""
    y = x + 0
    y[0, 0] = 7
    return y[0].sum()


def written_before(x: Tensor) -> Tensor:
    """A number of a view whose base is written to."""
    y = x + 0
    view = y[0]
    y.add_(1)
    return view.sum()


EXPRESSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "of rows": lambda x: (x == 1).all(),
    "of sums": lambda x: x.sum(1).cumsum(0)[-1],
    "with positions": lambda x: (torch.arange(3, device=x.device) + x).max(),
    "of a list": lambda x: (x * torch.tensor([1, 2, 3])).sum(),
    "through a view": lambda x: x.T.reshape(-1).unsqueeze(0)[:, 1:].sum(),
    "of a float": lambda x: (x.double() == 1).sum(),
    "of none": lambda x: torch.zeros_like(x).any(),
    "a written one": written,
    "a base written to": written_before,
    "drawn": lambda x: torch.randint(2, x.shape).sum() * x.sum(),
    "empty": lambda x: torch.empty_like(x).sum(),
}
UNANSWERED = {"of a float", "a written one", "a base written to", "drawn", "empty"}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_read_has_the_number_of_the_batch_or_torchs_error(name: str) -> None:
    fakes, expression = Fakes(values=True), EXPRESSIONS[name]
    rows, number = fakes.rows(ROWS, 3, 3), expression(ROWS).item()
    with fakes.entered():
        found = expression(rows)
        assert is_fake(found)
        assert imports.is_fake_tensor(found) == (name in UNANSWERED)
        if name in UNANSWERED:
            with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
                READS["read"](found)
        else:
            assert READS["read"](found) == number
    assert imports.is_fake_tensor(found)


def test_other_modules_get_torchs_error() -> None:
    fakes = Fakes(values=True)
    rows = fakes.rows(ROWS, 3, 3)
    with (
        fakes.entered(),
        pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException),
    ):
        (rows == 1).all().item()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_with_the_smallest_sums_are_among_any_number(count: int) -> None:
    fakes = Fakes(values=True)
    rows = fakes.rows(torch.tensor([[1, 1], [1, 1], [1, 0]]), 3, count)
    with fakes.entered():
        assert not READS["asks"](rows.all())


def test_a_tensor_that_is_too_large_to_compute_has_no_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the package makes its mask, as it does for every fake."""
    monkeypatch.setattr("anybatch.memory.fake_values.MOST", 9)
    fakes = Fakes(values=True)
    rows = fakes.rows(ROWS, 3, 3)
    with fakes.entered():
        assert READS["read"](rows[0].sum()) == 2
        for large in (torch.cat([rows, rows]).sum(), fakes.rows(ROWS, 3, 4).sum()):
            assert imports.is_fake_tensor(large)
            with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
                READS["read"](large)
