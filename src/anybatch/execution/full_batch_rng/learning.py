"""Draws of unknown layout: recorded, made for the present rows, and changed for a trial."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.core import accelerators
from anybatch.execution.full_batch_rng.kernels import Draw, category_of
from anybatch.execution.full_batch_rng.law import Law, Pattern, RowRange
from anybatch.execution.full_batch_rng.refuse import refuse_generator, state_now, unmoved
from anybatch.execution.full_batch_rng.shared import SharedDraws
from anybatch.execution.full_batch_rng.site import Site, site

EXTREMES = 64
"""Draws whose least and largest value represent the range of an entry."""


class EncounteredDraw(NamedTuple):
    """Draw of unknown layout, as one forward has recorded it; it holds no tensor."""

    place: Site
    number: int
    func: Any
    name: str
    pattern: Pattern


class Mark(NamedTuple):
    """Change to one sample's entries of a draw: NaN, the least or the largest value.

    Attributes:
        draw: its place among those of unknown layout.
        law: layout that selects the entries.
        sample: whose.
        value: "nan", "least" or "most".
        salt: other numbers let the draws behind it come out otherwise.
    """

    draw: int
    law: Law
    sample: int
    value: str
    salt: int


class Learning(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records draws of unknown layout, for its rows or a few more.

    Args:
        shared: of the step; draws that it knows are made for the full batch.
        rows: where the rows are in the full batch.
        among: number of rows that `fitted` layouts draw for, and the place of the rows in them.
        fitted: layouts of draws, by their place among those of unknown layout.
        mark: the change of one of these.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        shared: SharedDraws,
        rows: RowRange,
        among: RowRange,
        fitted: dict[int, Law],
        mark: Mark | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[EncounteredDraw] = []
        self._shared, self._rows, self._among = shared, rows, among
        self._fitted, self._mark = fitted, mark
        self._numbers: dict[tuple[int, ...], int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one kernel, and note it if it draws."""
        kwargs, category = kwargs or {}, category_of(func)
        if not category:
            return func(*args, **kwargs)
        if category in ("stateful", "unknown"):
            return unmoved(func, args, kwargs)
        draw = Draw(func, args, kwargs, category)
        if draw.idle:
            return draw.plain()
        refuse_generator(draw)
        place = site(self._shared.modules)
        number = self._numbers[place.chain] = self._numbers.get(place.chain, -1) + 1
        with torch._C.DisableTorchFunction():
            law = self._shared.laws.find(place, number)
            result = None if law is None else _drawn(draw, law, self._rows)
            return self._unknown(draw, place, number) if result is None else result

    def _unknown(self, draw: Draw, place: Site, number: int) -> Any:
        index, state = len(self.draws), state_now()
        self.draws.append(EncounteredDraw(place, number, draw.func, draw.name, draw.pattern))
        law = self._fitted.get(index)
        result = None if law is None else _drawn(draw, law, self._among)
        result = draw.plain() if result is None else result
        if self._mark is not None and self._mark.draw == index:
            _make(self._mark, draw, result, self._rows.size)
        salt = 0 if self._mark is None else self._mark.salt
        _seed(hash((state, salt)) & (2**62 - 1))
        return result


def _make(mark: Mark, draw: Draw, result: Any, n: int) -> None:
    """Change one sample's entries of a draw as the mark says."""
    drawn: Tensor = result[0] if isinstance(result, tuple) else result
    if mark.value != "nan":
        value = _extreme(draw, most=mark.value == "most")
        mark.law.of_sample(drawn, mark.sample, n).copy_(mark.law.of_sample(value, mark.sample, n))
    elif drawn.is_floating_point() or drawn.is_complex():
        mark.law.of_sample(drawn, mark.sample, n).fill_(torch.nan)


def _extreme(draw: Draw, *, most: bool) -> Tensor:
    """Return the least or the largest of many draws, entry by entry."""
    written = draw.category == "written"
    before = draw.args[0].clone() if written else None
    found: Tensor | None = None
    for _ in range(EXTREMES):
        drawn = draw.plain()
        drawn = (drawn[0] if isinstance(drawn, tuple) else drawn).clone()
        if found is not None:
            drawn = torch.maximum(found, drawn) if most else torch.minimum(found, drawn)
        found = drawn
    if before is not None:
        draw.args[0].copy_(before)
    assert found is not None
    if draw.name in ("bernoulli", "bernoulli_"):
        found.fill_(1 if most else 0)
    return found


def _drawn(draw: Draw, law: Law, rows: RowRange) -> Any:
    """Draw by a layout; None if it is not this draw's."""
    full = law.full_pattern(draw.pattern, rows)
    if full is None:
        return None
    return draw.plain() if law.dim is None else draw.draw_full(law, full, rows)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    accelerators.seed(seed)
