"""Rows of a wide linear map and their losses, a chunk of rows at a time, forward and backward.

Logits of a vocabulary are the largest tensor of many models, and three of them are there at once:
the logits, their logarithms and their gradient. A loss needs a few numbers of each row. So forward
computes the logits of a chunk of rows, takes these numbers, and drops the logits; backward computes
them again, and adds their part of the gradients.

    at once    h ──linear──> [rows, V] ──loss──> [rows]       3 x rows x V numbers
    chunked    h[0:c] ──> [c, V] ──> [c] │ h[c:2c] ──> ...    3 x c x V numbers, one product more

Source: u-cuDNN's conclusion, which asks for other layers than convolutions; Liger and torch's own
`linear_cross_entropy` compute one loss so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from anybatch.errors import LossError

BYTES = 4 * 2**20
"""Bytes of the logits of a chunk, where no number of rows is given."""

LEAST = 16
"""Rows of a chunk, where that many take more bytes."""


@dataclass(frozen=True)
class WideMap:
    """A linear map that has not been computed: ``scale * (h @ w.T + b)``.

    Attributes:
        h: [..., d], the rows.
        w: [V, d].
        b: [V]; None adds nothing.
        scale: a number.
    """

    h: Tensor
    w: Tensor
    b: Tensor | None = None
    scale: float = 1.0


Step = Callable[[Tensor], Tensor]
"""Computes with logits of some rows, each row by itself."""


@dataclass(frozen=True)
class RowsFunction:
    """Function of each row of logits by itself.

    Attributes:
        scales: of the maps, which are added up.
        steps: one after the other, from logits [c, V] to logits [c, V].
        last: from logits [c, V] and c rows of other tensors to c rows of results.
        chunk: c, rows that are computed at once.
    """

    scales: tuple[float, ...]
    steps: tuple[Step, ...]
    last: Callable[..., Tensor]
    chunk: int

    def logits(self, maps: list[tuple[Tensor, Tensor, Tensor | None]]) -> Tensor:
        """Return the sum of some rows of linear maps."""
        found: Tensor | None = None
        for scale, (h, w, b) in zip(self.scales, maps, strict=True):
            one = F.linear(h, w, b)
            one = one if scale == 1.0 else one * scale
            found = one if found is None else found + one
        assert found is not None
        return found

    def result(self, logits: Tensor, others: list[Tensor]) -> Tensor:
        """Return the results of some rows."""
        for step in self.steps:
            logits = step(logits)
        return self.last(logits, *others)


def rows_of(
    maps: tuple[WideMap, ...],
    steps: tuple[Step, ...],
    last: Callable[..., Tensor],
    others: list[Tensor],
    rows: int | None,
) -> Tensor:
    """Return ``last(steps(sum of maps), *others)`` of all rows, computed in chunks of them.

    Args:
        maps: linear maps of as many rows, to as many columns; all but the last dimension are rows.
        steps: computations with logits, each row by itself.
        last: the results of rows of logits and of the other tensors.
        others: tensors with a row for each row of logits, without gradients.
        rows: of a chunk; None is as many as take `BYTES`, and `LEAST` at least.

    Returns:
        The results, the rows first, in one dimension.
    """
    wide, each = maps[0].w.shape[0], maps[0].h.element_size()
    chunk = rows or max(LEAST, BYTES // max(1, wide * each))
    last = as_now(maps[0].h, last)
    function = RowsFunction(tuple(one.scale for one in maps), steps, last, chunk)
    tensors: list[Tensor | None] = []
    for one in maps:
        tensors += [one.h.reshape(-1, one.h.shape[-1]), one.w, one.b]
    found: Tensor = ChunkedRows.apply(function, *tensors, *others)  # type: ignore[no-untyped-call]
    return found


class ChunkedRows(torch.autograd.Function):
    """`rows_of`, with a backward that computes the logits of each chunk again."""

    @staticmethod
    def forward(ctx: Any, function: RowsFunction, *tensors: Tensor | None) -> Tensor:
        """Return the results of all rows."""
        ctx.function = function
        ctx.save_for_backward(*tensors)
        found = [
            function.result(function.logits(maps), others)
            for _, maps, others in _chunks(function, tensors)
        ]
        result = found[0] if len(found) == 1 else torch.cat(found)
        if not result.is_floating_point():
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the rows, weights and biases of the maps."""
        function, (gradient,) = ctx.function, gradients
        tensors: tuple[Tensor | None, ...] = ctx.saved_tensors
        count = 3 * len(function.scales)
        sums = [
            _zeros(one, wide=place % 3 > 0) if one is not None and needed else None
            for place, (one, needed) in enumerate(
                zip(tensors[:count], ctx.needs_input_grad[1:], strict=False)
            )
        ]
        with torch._C.DisableTorchFunction():  # no mode around backward is to hear of it
            for rows, maps, others in _chunks(function, tensors):
                with torch.enable_grad():
                    leaf = function.logits(maps).detach().requires_grad_()
                    result = function.result(leaf, others)
                (dz,) = torch.autograd.grad(result, leaf, gradient[rows])
                del leaf, result
                _add(sums, function, maps, dz, rows)
        found = [
            None if sum_ is None or one is None else sum_.to(one.dtype)
            for sum_, one in zip(sums, tensors, strict=False)
        ]
        return None, *found, *(None for _ in tensors[count:])


def _add(
    sums: list[Tensor | None],
    function: RowsFunction,
    maps: list[tuple[Tensor, Tensor, Tensor | None]],
    dz: Tensor,
    rows: slice,
) -> None:
    """Add the part of some rows to the gradients of maps."""
    for place, (scale, (h, w, _)) in enumerate(zip(function.scales, maps, strict=True)):
        d = dz if scale == 1.0 else dz * scale
        of_h, of_w, of_b = sums[3 * place : 3 * place + 3]
        if of_h is not None:
            torch.mm(d, w, out=of_h[rows])
        if of_w is not None and of_w.dtype == d.dtype:
            of_w.addmm_(d.t(), h)
        elif of_w is not None:
            of_w += d.t() @ h
        if of_b is not None:
            of_b += d.sum(0, dtype=of_b.dtype)


def _zeros(one: Tensor, *, wide: bool) -> Tensor:
    """Return a place for the sum of a gradient; half precision would lose the later chunks.

    (test_gradients_of_chunks_are_summed_in_float32)
    """
    half = wide and one.dtype in (torch.float16, torch.bfloat16)
    return torch.zeros_like(one, dtype=torch.float32 if half else one.dtype)


def _chunks(
    function: RowsFunction, tensors: tuple[Tensor | None, ...]
) -> Iterator[tuple[slice, list[tuple[Tensor, Tensor, Tensor | None]], list[Tensor]]]:
    """Yield the places of some rows, the maps of these, and these rows of other tensors."""
    count, every = len(function.scales), tensors
    first = every[0]
    assert first is not None
    for begin in range(0, max(1, len(first)), function.chunk):
        rows = slice(begin, min(begin + function.chunk, len(first)))
        maps = []
        for place in range(count):
            h, w, b = every[3 * place : 3 * place + 3]
            assert h is not None
            assert w is not None
            maps.append((h[rows], w, b))
        yield rows, maps, [one[rows] for one in every[3 * count :] if one is not None]


def as_now(one: Tensor, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that computes under the autocast of this moment, in backward, too."""
    device = one.device.type
    if not torch.is_autocast_enabled(device):
        return compute
    dtype = torch.get_autocast_dtype(device)

    def computed(*args: Any) -> Tensor:
        with torch.autocast(device, dtype=dtype, cache_enabled=False):
            return compute(*args)

    return computed


@dataclass
class ChunkedLosses:
    """Report on the losses of a context.

    Attributes:
        chunked: calls that were computed in chunks, by the name of the function.
        materialised: calls that got all logits at once, by the name of the function.
    """

    chunked: Counter[str] = field(default_factory=Counter)
    materialised: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        """Return one line for each of both."""
        lines = [("in chunks", self.chunked), ("materialised", self.materialised)]
        return "\n".join(
            f"{what}: " + (", ".join(f"{name} ({n})" for name, n in found.items()) or "none")
            for what, found in lines
        )


@dataclass(frozen=True)
class LogitsSource:
    """Computation of logits that has not been run.

    Attributes:
        maps: linear maps, which are added up: a layer, and its adapters.
        report: of the context.
        rows: of a chunk; None follows from the number of columns.
        steps: computations with logits, each row by itself.
        dtype: of the logits; None is that of the maps.
        place: the dimension of the columns; -1 is the last one.
        versions: of the tensors of the maps, when the map was called.
    """

    maps: tuple[WideMap, ...]
    report: ChunkedLosses
    rows: int | None
    steps: tuple[Step, ...] = ()
    dtype: torch.dtype | None = None
    place: int = -1
    versions: tuple[int, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the maps."""
        return [t for one in self.maps for t in (one.h, one.w, one.b) if t is not None]

    def refuse_written(self) -> None:
        """Refuse maps of which a tensor has been written to since they were called.

        Raises:
            LossError: one has been.
        """
        if self.versions and self.versions != tuple(one._version for one in self.tensors):
            raise LossError(
                "a wide linear map that is computed in chunks must find its input and weight as "
                "they were when it was called, and one of them has been written to in place since: "
                "write to a copy, or leave out chunked_losses"
            )

    @property
    def lead(self) -> torch.Size:
        """The shape without the columns."""
        return self.maps[0].h.shape[:-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits."""
        shape = list(self.lead)
        shape.insert(self.place if self.place >= 0 else len(shape), self.columns)
        return tuple(shape)

    @property
    def columns(self) -> int:
        """How many there are."""
        return int(self.maps[0].w.shape[0])

    def materialise(self) -> Tensor:
        """Return the logits."""
        self.refuse_written()
        with torch._C.DisableTorchFunction():
            return self._computed()

    def _computed(self) -> Tensor:
        found: Tensor | None = None
        for one in self.maps:
            each = F.linear(one.h, one.w, one.b)
            each = each if one.scale == 1.0 else each * one.scale
            found = each if found is None else found + each
        assert found is not None
        for step in self.steps:
            found = step(found)
        return found if self.place < 0 else found.movedim(-1, self.place)

    def then(self, step: Step) -> LogitsSource:
        """Return the source of a function of these logits, each row by itself."""
        like = self.maps[0].h
        step = as_now(like, step)
        empty = torch.empty((0, self.columns), dtype=self.dtype_now, device=like.device)
        return replace(self, steps=(*self.steps, step), dtype=step(empty).dtype)

    def detached(self) -> LogitsSource:
        """Return the source of the same logits without a gradient."""
        maps = [
            replace(m, h=m.h.detach(), w=m.w.detach(), b=None if m.b is None else m.b.detach())
            for m in self.maps
        ]
        return replace(self, maps=tuple(maps))

    def times(self, scale: float) -> LogitsSource:
        """Return the source of these logits times a number."""
        return replace(self, maps=tuple(replace(m, scale=m.scale * scale) for m in self.maps))

    @property
    def dtype_now(self) -> torch.dtype:
        """The dtype of the logits."""
        return self.maps[0].h.dtype if self.dtype is None else self.dtype

    def of_rows(self, move: Callable[[Tensor], Tensor]) -> LogitsSource:
        """Return the source of the same columns of other rows."""
        return replace(self, maps=tuple(replace(one, h=move(one.h)) for one in self.maps))

    def reduced(self, last: Callable[..., Tensor], *others: Tensor) -> Tensor:
        """Return a function of each row by itself, in chunks; all rows are one dimension."""
        self.refuse_written()
        return rows_of(self.maps, self.steps, last, list(others), self.rows)
