"""Rows of a wide linear map and their losses, a chunk of rows at a time, forward and backward.

Logits of a vocabulary are the largest tensor of many models, and three of them are there at once:
the logits, their logarithms and their gradient. A loss needs a few numbers of each row. So forward
computes the logits of a chunk of rows, takes these numbers, and drops the logits; backward computes
them again, and adds their part of the gradients. A sum over rows has the same gradient for each of
them, but for a factor: forward computes it at once, and backward multiplies.

    at once    h ──linear──> [rows, V] ──loss──> [rows]       3 x rows x V numbers
    chunked    h[0:c] ──> [c, V] ──> [c] │ h[c:2c] ──> ...    3 x c x V numbers, one product more
    a sum      h[0:c] ──> [c, V] ──> 1, gradients │ ...       3 x c x V numbers, no product more

Source: u-cuDNN's conclusion, which asks for other layers than convolutions; Liger and torch's own
`linear_cross_entropy` compute one loss so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from anybatch.core import accelerator
from anybatch.core.modules import in_part
from anybatch.core.moments import HALF
from anybatch.errors import LossError
from anybatch.loss.row_gradients import CrossEntropy, Differentiated, differentiated
from anybatch.memory.fakes import is_fake

BYTES = 16 * 2**20
"""Bytes of the logits of a chunk, where no number of rows is given, unless more rows are faster."""

MOST = 256
"""Rows of a chunk on a CPU, above which more are not faster."""

THERE = 4096, 2048
"""Rows of chunks on a GPU: 1.07 to 1.23, and 1.09 to 1.32 times the seconds of all at once."""

FEW = 2
"""Columns that an inspection computes: rows meet in all of them or in none."""

REMEDY = 'leave out chunked_losses, or give an Engine rungs=["offload"]'

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

    @property
    def tensors(self) -> list[Tensor]:
        """Rows, weight and bias."""
        return [one for one in (self.h, self.w, self.b) if one is not None]

    def each(self, change: Callable[[Tensor], Tensor]) -> WideMap:
        """Return the map of changed tensors."""
        h, w = change(self.h), change(self.w)
        return replace(self, h=h, w=w, b=None if self.b is None else change(self.b))

    def as_called(self) -> WideMap:
        """Return the map with the graph of this moment, for any `requires_grad` later."""
        return self.each(lambda one: one.expand_as(one) if one.requires_grad else one.detach())


Recorded = Callable[[Tensor], Tensor]
"""Computes with logits of some rows, each row by itself."""


@dataclass(frozen=True)
class RowsFunction:
    """Function of each row of logits by itself.

    Attributes:
        scales: of the maps, which are added up.
        recorded: functions, one after the other, from logits [c, V] to logits [c, V].
        last: from logits [c, V] and c rows of other tensors to c rows of results.
        chunk: c, rows that are computed at once.
        total: the result is the sum of all rows.
        count: the sum is divided by it; None divides it by nothing.
        trains: backward follows, so of a sum the gradients are computed in forward.
    """

    scales: tuple[float, ...]
    recorded: tuple[Recorded, ...]
    last: Callable[..., Tensor]
    chunk: int
    total: bool = False
    count: Tensor | None = None
    trains: bool = False

    def logits(self, maps: list[tuple[Tensor, Tensor, Tensor | None]]) -> Tensor:
        """Return the sum of some rows of linear maps."""
        found: Tensor | None = None
        with autocast_as(maps[0][0].device.type, False, maps[0][0].dtype):
            for scale, (h, w, b) in zip(self.scales, maps, strict=True):
                one = F.linear(h, w, b)
                one = one if scale == 1.0 else one * scale
                found = one if found is None else found + one
        assert found is not None
        return found

    def result(self, logits: Tensor, others: list[Tensor]) -> Tensor:
        """Return the results of some rows."""
        for compute in self.recorded:
            logits = compute(logits)
        return self.last(logits, *others)

    def differentiated(
        self, maps: list[tuple[Tensor, Tensor, Tensor | None]], others: list[Tensor]
    ) -> Differentiated:
        """Return the results of some rows or their sum, and the function to gradients of logits."""
        held, own = [self.logits(maps)], not self.recorded
        if own and isinstance(self.last, CrossEntropy) and held[0].dtype not in HALF:
            result, backward = self.last.differentiated(held.pop(), *others)
            return (result.sum() if self.total else result), backward

        def results(logits: Tensor) -> Tensor:
            result = self.result(logits, others)
            return result.sum() if self.total else result

        return differentiated(held, results)


def rows_of(
    maps: tuple[WideMap, ...],
    recorded: tuple[Recorded, ...],
    last: Callable[..., Tensor],
    others: list[Tensor],
    rows: int,
    *,
    total: bool = False,
    count: Tensor | None = None,
    twice: bool = False,
) -> Tensor:
    """Return ``last(recorded(sum of maps), *others)`` of all rows, computed in chunks of them.

    Args:
        maps: linear maps of as many rows, to as many columns; all but the last dimension are rows.
        recorded: computations with logits, each row by itself.
        last: the results of rows of logits and of the other tensors.
        others: tensors with a row for each row of logits, without gradients.
        rows: of a chunk.
        total: return the sum of the results of all rows. Default False.
        count: divide the sum by it. Default None: by nothing.
        twice: compute logits in forward and again in backward, of a sum, too. Default False.

    Returns:
        The results, the rows first, in one dimension.
    """
    if isinstance(last, CrossEntropy):
        last = replace(last, compute=as_now(maps[0].h, last.compute))
    else:
        last = as_now(maps[0].h, last)
    tensors: list[Tensor | None] = []
    for one in maps:
        tensors += [one.h.reshape(-1, one.h.shape[-1]), one.w, one.b]
    graph = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    graph &= not twice
    scales = tuple(one.scale for one in maps)
    function = RowsFunction(scales, recorded, last, rows, total, count, trains=total and graph)
    found: Tensor = ChunkedRows.apply(function, *tensors, *others)  # type: ignore[no-untyped-call]
    return found


class ChunkedRows(torch.autograd.Function):
    """`rows_of`, with a backward that computes logits again, unless the rows are added up."""

    @staticmethod
    def forward(ctx: Any, function: RowsFunction, *tensors: Tensor | None) -> Tensor:
        """Return the results of all rows, or their sum."""
        ctx.function, ctx.sums = function, None
        ctx.save_for_backward(*tensors)
        if function.trains:
            ctx.sums = _places(function, tensors, ctx.needs_input_grad[1:])
            result = _differentiated(function, tensors, ctx.sums, None)
            assert result is not None
            return result
        parts = (
            function.result(function.logits(maps), others)
            for _, maps, others in _chunks(function, tensors)
        )
        if function.total:
            total, dtype = None, torch.float32
            for part in parts:
                total, dtype = _added(total, part.sum()), part.dtype
            assert total is not None
            return _over(total, function).to(dtype)
        found = list(parts)
        if is_fake(found[0]):  # one chunk stands for all of them
            result = found[0].new_empty((len(tensors[0]), *found[0].shape[1:]))  # type: ignore[arg-type]
        else:
            result = found[0] if len(found) == 1 else torch.cat(found)
        if not result.is_floating_point():
            ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the rows, weights and biases of the maps."""
        refuse_second_derivatives()
        function, (gradient,) = ctx.function, gradients
        tensors: tuple[Tensor | None, ...] = ctx.saved_tensors
        sums, ctx.sums = ctx.sums, None  # a second backward computes them again
        if sums is not None:
            for one in sums:
                if one is not None:
                    one.mul_(gradient)
        else:
            sums = _places(function, tensors, ctx.needs_input_grad[1:])
            _differentiated(function, tensors, sums, gradient)
        found = [
            None if sum_ is None or one is None else sum_.to(one.dtype)
            for sum_, one in zip(sums, tensors, strict=False)
        ]
        return None, *found, *(None for _ in tensors[len(sums) :])


def _places(
    function: RowsFunction, tensors: tuple[Tensor | None, ...], needed: tuple[bool, ...]
) -> list[Tensor | None]:
    count = 3 * len(function.scales)
    pairs = enumerate(zip(tensors[:count], needed, strict=False))
    return [
        _zeros(one, wide=place % 3 > 0) if one is not None and wanted else None
        for place, (one, wanted) in pairs
    ]


def _differentiated(
    function: RowsFunction,
    tensors: tuple[Tensor | None, ...],
    sums: list[Tensor | None],
    gradient: Tensor | None,
) -> Tensor | None:
    """Add the gradients of all rows to `sums`; return the sum of the results.

    Args:
        function: of the rows.
        tensors: of the maps, and others.
        sums: receive the gradients of the maps.
        gradient: of the results, one for each row, or one for their sum; None is 1, in forward.
    """
    found, dtype = None, torch.float32
    # No mode around backward is to hear of it, and nothing inside is offloaded.
    with plain(tensors[0]), in_part():  # type: ignore[arg-type]
        for rows, maps, others in _chunks(function, tensors):
            result, backward = function.differentiated(maps, others)
            some = torch.ones_like(result) if gradient is None else gradient
            some = some if function.total else some[rows]
            # Divided before backward rounds (test_losses_in_chunks_are_those_of_whole_logits).
            some = some if function.count is None else some / function.count.to(some)
            dz = backward(some)
            if gradient is None:
                found, dtype = _added(found, result.detach()), result.dtype
            del backward, result
            _add(sums, function, maps, dz, rows)
            del dz  # before the next chunk (test_no_step_holds_more_than_its_forecast)
    return None if found is None else _over(found, function).to(dtype)


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """Return a running total in float32 at least, which holds one number for any chunks."""
    part = part.float() if part.dtype in HALF else part
    return part.clone() if total is None else total.add_(part)


def _over(total: Tensor, function: RowsFunction) -> Tensor:
    return total if function.count is None else total / function.count.to(total)


def _add(
    sums: list[Tensor | None],
    function: RowsFunction,
    maps: list[tuple[Tensor, Tensor, Tensor | None]],
    dz: Tensor,
    rows: slice,
) -> None:
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
    half = wide and one.dtype in HALF
    return torch.zeros_like(one, dtype=torch.float32 if half else one.dtype)


def _chunks(
    function: RowsFunction, tensors: tuple[Tensor | None, ...]
) -> Iterator[tuple[slice, list[tuple[Tensor, Tensor, Tensor | None]], list[Tensor]]]:
    """Yield the places of some rows, the maps of these, and these rows of other tensors.

    Of tensors without data one chunk only: a dry run counts bytes, in as many kernels for any rows.
    """
    count, every = len(function.scales), tensors
    first = every[0]
    assert first is not None
    ends = function.chunk if is_fake(first) else len(first)
    for begin in range(0, max(1, ends), function.chunk):
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
    setting = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def computed(*args: Any) -> Tensor:
        with autocast_as(device, *setting):
            return compute(*args)

    return computed


def autocast_as(device: str, enabled: bool, dtype: torch.dtype) -> AbstractContextManager[Any]:  # noqa: FBT001
    """Return a context with this autocast; none where it is so already."""
    if not enabled and not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)


def plain(one: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast, and without any mode or function of a subclass."""
    stack = ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(autocast_as(one.device.type, False, one.dtype))
    return stack


def refuse_second_derivatives() -> None:
    """Refuse a backward for a second derivative."""
    if torch.is_grad_enabled():
        raise LossError(
            "a loss that is computed in chunks has no second derivatives, and backward was called "
            f"with create_graph=True: {REMEDY}"
        )


@dataclass
class ChunkedLosses:
    """Report on the losses of a context.

    Attributes:
        chunked: calls that were computed in chunks, by the name of the function.
        materialised: calls that got all logits at once, by the name of the function.
        nbytes: of the logits of a chunk, where no number of rows is given; 0 (default) is as many
            as are fast.
    """

    chunked: Counter[str] = field(default_factory=Counter)
    materialised: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0

    def rows(self, one: WideMap) -> int:
        """Return the rows of a chunk of a map: as many as take `nbytes`, and `LEAST` at least."""
        columns, features = one.w.shape
        nbytes = self.nbytes or fast_chunks(columns, features, one.h)[0]
        return max(LEAST, nbytes // (columns * one.h.element_size()))

    def __str__(self) -> str:
        """Return one line for each of both."""
        lines = [("in chunks", self.chunked), ("materialised", self.materialised)]
        return "\n".join(
            f"{what}: " + (", ".join(f"{name} ({n})" for name, n in found.items()) or "none")
            for what, found in lines
        )


def few_of(one: Tensor, columns: int = FEW) -> Tensor:
    """Return the first columns, or rows, of a tensor, in which the samples of all have a part.

    A weight or a target may be computed from other samples from the third column on
    (test_samples_that_meet_in_later_columns_are_found).
    """
    return one[:columns] + one.sum(0, keepdim=True) * 0


def fast_chunks(columns: int, features: int, rows: Tensor) -> tuple[int, int]:
    """Return the bytes of the chunks of logits that are fast: one to prefer, and the least one.

    A chunk reads the weight twice and its gradient is added to, so on a CPU it has about as many
    rows as there are features, and 256 at most; a GPU needs more (`benchmarks/ucudnn/heads`).
    """
    row = columns * rows.element_size()
    if not accelerator.of(rows.device).host:
        return max(BYTES, THERE[0] * row), THERE[1] * row
    least = max(LEAST, min(features, MOST)) * row
    return max(BYTES, least), least


def chunks_of(nbytes: int) -> ChunkedLosses | None:
    """Return a report for chunks of so many bytes; None for 0, which is no chunks."""
    return ChunkedLosses(nbytes=nbytes) if nbytes else None


@dataclass(frozen=True)
class LogitsSource:
    """Computation of logits that has not been run.

    Attributes:
        maps: linear maps, which are added up: a layer, and its adapters.
        report: of the context.
        rows: of a chunk.
        recorded: computations with logits, each row by itself.
        dtype: of the logits; None is that of the maps.
        place: the dimension of the columns; -1 is the last one.
        fixed: tensors of the maps, and their versions when the map was called.
        few: compute `FEW` columns only, for an inspection of the rows.
        rounds: a recorded function computes in a lower precision than the maps.
    """

    maps: tuple[WideMap, ...]
    report: ChunkedLosses
    rows: int
    recorded: tuple[Recorded, ...] = ()
    dtype: torch.dtype | None = None
    place: int = -1
    fixed: tuple[tuple[Tensor, int], ...] = ()
    few: bool = False
    rounds: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the maps."""
        return [tensor for one in self.maps for tensor in one.tensors]

    def refuse_written(self) -> None:
        """Refuse maps of which a tensor has been written to since they were called."""
        if any(one._version != version for one, version in self.fixed):
            raise LossError(
                "a wide linear map that is computed in chunks must find its input and weight as "
                "they were when it was called, and one of them has been written to in place since: "
                f"write to a copy, or {REMEDY}"
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
        with plain(self.maps[0].h):
            return self._computed()

    def _computed(self) -> Tensor:
        function = RowsFunction(
            tuple(one.scale for one in self.maps), self.recorded, torch.clone, 0
        )
        found = function.logits([(one.h, one.w, one.b) for one in self.maps])
        for compute in self.recorded:
            found = compute(found)
        return found if self.place < 0 else found.movedim(-1, self.place)

    def then(self, function: Recorded) -> LogitsSource:
        """Return the source of a function of these logits, each row by itself."""
        like = self.maps[0].h
        function = as_now(like, function)
        empty = torch.empty((0, self.columns), dtype=self.dtype_now, device=like.device)
        dtype = function(empty).dtype
        rounds = self.rounds or dtype.itemsize < like.dtype.itemsize
        return replace(self, recorded=(*self.recorded, function), dtype=dtype, rounds=rounds)

    def column(self) -> Tensor:
        """Return one column of their shape, in which the samples of all have a part."""
        return self._of_few_columns(lambda z: z[:, :1], ()).reshape(*self.lead, 1)

    def stand_in(self) -> Tensor:
        """Return a tensor of their shape with the values of one column, which takes no memory."""
        found = self.column().expand(*self.lead, self.columns)
        return found if self.place < 0 else found.movedim(-1, self.place)

    def detached(self) -> LogitsSource:
        """Return the source of the same logits without a gradient."""
        return replace(self, maps=tuple(one.each(Tensor.detach) for one in self.maps))

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

    def reduced(
        self,
        last: Callable[..., Tensor],
        *others: Tensor,
        few: tuple[Callable[..., Tensor], tuple[Tensor, ...]] | None = None,
        total: bool = False,
        count: Tensor | None = None,
    ) -> Tensor:
        """Return a function of each row by itself, in chunks; all rows are one dimension.

        Args:
            last: the results of rows of logits and of the other tensors.
            others: tensors with a row for each row of logits, without gradients.
            few: both for `FEW` columns; None (default) where they are the same.
            total: return the sum of all rows. Default False.
            count: divide the sum by it. Default None: by nothing.
        """
        self.refuse_written()
        rows = self.maps, self.recorded, last, list(others), self.rows
        if not self.few:
            # A gradient that is rounded and then weighed is another one than the other way round.
            return rows_of(*rows, total=total, count=count, twice=self.rounds)
        found = self._of_few_columns(*(few or (last, others)))
        found = found.sum() if total else found
        found = found if count is None else found / count.to(found)
        fake = is_fake(found)
        # Code may branch by them (test_samples_that_meet_in_later_columns_are_found).
        with torch.no_grad(), nullcontext() if fake else _disable_current_modes():
            values = rows_of(*rows, total=total, count=count)
            if not fake:
                found.data.copy_(values)
        return found

    def _of_few_columns(self, last: Callable[..., Tensor], others: tuple[Tensor, ...]) -> Tensor:
        """Return a function of rows with few columns, in which the samples of all have a part."""
        maps = [
            (m.h.reshape(-1, m.h.shape[-1]), few_of(m.w), None if m.b is None else few_of(m.b))
            for m in self.maps
        ]
        function = RowsFunction(tuple(m.scale for m in self.maps), self.recorded, last, 0)
        return function.result(function.logits(maps), list(others))
