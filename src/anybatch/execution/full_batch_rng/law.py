"""Layout of a draw: the entries of each sample, and those of a micro-batch among all.

The undivided batch draws once for all samples. A micro-batch that draws as many numbers and keeps
its rows has the same ones, if it knows three things of the tensor that it would draw: the dimension
that grows with the samples, how a sample's entries lie in it, and how all of it lies in memory, for
kernels fill memory in its own order.

    [n, C]                dimension 0, one entry a sample
    [n * heads, T, T]     dimension 0, `heads` neighbours a sample           before 1
    [views * n, C]        dimension 0, `views` entries, n apart              after 1
    [T, n, C]             dimension 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RowRange(NamedTuple):
    """The samples of a micro-batch: the first, how many, of how many, and whether in reverse."""

    begin: int
    size: int
    of: int
    turned: bool = False


class Pattern(NamedTuple):
    """Shape and strides of a tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def clean(self) -> Pattern:
        """Return it with stride 0 where there is one entry: the stride there means nothing."""
        pairs = zip(self.sizes, self.strides, strict=True)
        return Pattern(self.sizes, tuple(stride if size > 1 else 0 for size, stride in pairs))

    @property
    def dense(self) -> bool:
        """Whether its entries lie side by side, in any order of dimensions."""
        several = [d for d in range(len(self.sizes)) if self.sizes[d] > 1]
        order = sorted(several, key=lambda d: self.strides[d], reverse=True)
        return laid(self.sizes, order).clean() == self.clean()


def pattern_of(tensor: Tensor) -> Pattern:
    """Return shape and strides of a tensor."""
    return Pattern(tuple(tensor.shape), tuple(tensor.stride()))


def laid(sizes: Sequence[int], order: Sequence[int]) -> Pattern:
    """Return the pattern of dense entries, with dimensions in `order` of falling strides."""
    strides, step = [1] * len(sizes), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return Pattern(tuple(sizes), tuple(strides))


def contiguous(sizes: Sequence[int]) -> Pattern:
    """Return the pattern of a new tensor."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return Pattern(tuple(sizes), tuple(reversed(strides)))


@dataclass(frozen=True)
class Law:
    """Where a draw holds the samples, for any number of them.

    Attributes:
        dim: the dimension; None where it is the same for all samples.
        before: the dimension is [before, n, after]; None is the rest.
        after: the same; one of the two is not None.
        order: dimensions of more than one entry as they lie in memory, the largest stride first.
    """

    dim: int | None
    before: int | None = 1
    after: int | None = None
    order: tuple[int, ...] = field(default=(), compare=False)

    @property
    def inside(self) -> frozenset[int]:
        """Dimensions that lie closer together in memory than `dim`."""
        if self.dim not in self.order:
            return frozenset()
        return frozenset(self.order[self.order.index(self.dim) + 1 :])

    def parts(self, entries: int, n: int) -> tuple[int, int] | None:
        """Return `before` and `after` for `entries` along the dimension; None if it cannot be."""
        each, rest = divmod(entries, n)
        if rest:
            return None
        before = each // (self.after or 1) if self.before is None else self.before
        after = each // max(before, 1) if self.after is None else self.after
        return (before, after) if before * after == each else None

    def full_pattern(self, own: Pattern, rows: RowRange) -> Pattern | None:
        """Return the pattern of the full-batch draw, from that of a micro-batch.

        Returns:
            The pattern; None if the one passed in has another layout.
        """
        dim = self.dim
        if dim is None:
            return own
        if dim >= len(own.sizes) or self.parts(own.sizes[dim], rows.size) is None:
            return None
        sizes, strides = list(own.sizes), list(own.strides)
        single = sizes[dim] == 1
        if single:  # its stride may be anything
            spans = (own.sizes[d] * own.strides[d] for d in self.inside if own.sizes[d] > 1)
            strides[dim] = max(spans, default=1)
        for other in range(len(sizes)):
            if other == dim or sizes[other] <= 1:
                continue
            if other not in self.inside if single else strides[other] > strides[dim]:
                step, rest = divmod(strides[other], rows.size)
                if rest:
                    return None
                strides[other] = step * rows.of
        sizes[dim] = sizes[dim] // rows.size * rows.of
        if (
            single
            and own.dense
            and {d for d, size in enumerate(sizes) if size > 1} == {*self.order}
        ):
            return laid(sizes, self.order)
        return Pattern(tuple(sizes), tuple(strides))

    def view(self, full: Tensor, rows: RowRange) -> Tensor:
        """Return the entries of `rows` in a draw of the batch, as a view with split dimension."""
        assert self.dim is not None
        parts = self.parts(full.shape[self.dim], rows.of)
        assert parts is not None
        dims = parts[0], rows.of, parts[1]
        split: Tensor = full.unflatten(self.dim, dims)  # type: ignore[no-untyped-call]
        return split.narrow(self.dim + 1, rows.begin, rows.size)

    def select(self, full: Tensor, rows: RowRange) -> Tensor:
        """Return the entries of `rows`, in the shape that the micro-batch would draw."""
        if self.dim is None:
            return full
        view = self.view(full, rows)
        view = view.flip(self.dim + 1) if rows.turned else view
        return view.flatten(self.dim, self.dim + 2)

    def put(self, full: Tensor, own: Tensor, rows: RowRange) -> None:
        """Write a micro-batch's entries to the place of its rows."""
        view = self.view(full, rows)
        assert self.dim is not None
        split = own.reshape(view.shape)
        view.copy_(split.flip(self.dim + 1) if rows.turned else split)

    def of_sample(self, own: Tensor, sample: int, n: int) -> Tensor:
        """Return the entries of one of `n` samples, as a view."""
        return self.view(own, RowRange(sample, 1, n))


def fitted(patterns: Sequence[Pattern], counts: Sequence[int]) -> Law | None:
    """Return the layout of a draw that was observed at several numbers of samples.

    Args:
        patterns: of the draw, at each number; the first is of the most samples.
        counts: the numbers, all different.

    Returns:
        The layout, neighbours a sample; None where there is none.
    """
    shapes = [pattern.sizes for pattern in patterns]
    if len({len(shape) for shape in shapes}) > 1:
        return None
    changed = [d for d, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    if not changed:
        return Law(None)
    dim = changed[0]
    each = shapes[0][dim] // counts[0]
    steady = all(shape[dim] == each * n for shape, n in zip(shapes, counts, strict=True))
    if len(changed) > 1 or not steady or each == 0:
        return None
    sizes, strides = patterns[0]
    several = [d for d in range(len(sizes)) if sizes[d] > 1]
    order = sorted(
        several, key=lambda d: (d != dim and strides[d] >= strides[dim], strides[d]), reverse=True
    )
    return Law(dim, 1, None, tuple(order))


def candidates(law: Law, entries: int, n: int) -> Iterator[Law]:
    """Yield the ways in which a sample's entries may lie in its dimension, likely ones first."""
    each = entries // n
    yield law
    if each > 1:
        yield Law(law.dim, None, 1, law.order)
    for before in range(2, each):
        if each % before == 0:
            yield Law(law.dim, before, each // before, law.order)


def empty(pattern: Pattern, like: Tensor, dtype: torch.dtype | None = None) -> Any:
    """Return a tensor of a pattern, without values."""
    return torch.empty_strided(
        pattern.sizes, pattern.strides, dtype=dtype or like.dtype, device=like.device
    )
