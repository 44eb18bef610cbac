"""Rules of tables and places: kernels that read, write and choose rows by an index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anybatch.execution.proof import masks as sets
from anybatch.execution.proof.kernel_call import (
    Call,
    Found,
    leads_back,
    rule,
    varies,
    varies_somewhere,
)
from anybatch.execution.proof.masks import ALL, INTEGERS, LOOSE, PLACE, SAMPLES, fold, total, union
from anybatch.memory.meter import tensors_in


def _placed(call: Call, places: Tensor, table: Tensor, dim: int | None = None) -> Tensor:
    """Return the marks that indices add to the mask of the elements that they read.

    A place among samples that leads to a sample's own number adds nothing to it, nor does one in a
    tensor of one number, or one whose entries along `dim` are one and the same. Read out of a table
    of no sample's, the place is itself a value.
    """
    mask = call.full(places)
    alike = _of_one_number(call, table) or (dim is not None and _is_alike(call, table, dim))
    if call.mask(table) is not None or alike:
        return mask & ~PLACE & 0xFF
    if table.dtype in INTEGERS or call.backward:
        return mask
    return mask | (((mask & PLACE) != 0).to(torch.uint8) * ALL)


def _is_alike(call: Call, tensor: Tensor, dim: int) -> bool:
    """Say whether entries along a dimension are one, expanded, or were made alike of no sample."""
    if not tensor.dim() or tensor.shape[dim] < 2 or tensor.stride(dim) == 0:
        return True
    return id(tensor) in call.alike and bool((tensor == tensor.narrow(dim, 0, 1)).all())


def _of_one_number(call: Call, tensor: Tensor) -> bool:
    """Say whether forward has made a tensor of one number, and it still is."""
    return id(tensor) in call.filled and bool((tensor == tensor.flatten()[:1]).all())


def _read(got: Tensor, index: Tensor | None) -> Tensor:
    """Return the mask of elements read at places; an inverse order restores that of the rows."""
    return got & ~LOOSE & 0xFF if index is not None and leads_back(index) else got


def _written_at(call: Call, places: Tensor, *, leads: bool) -> Tensor:
    """Return the marks that indices add to the mask of the elements that are written there.

    It `leads` where the source, or the target, is the samples' own. Else a place that no sample has
    chosen is itself a value, unless each row is written to equally.
    """
    mask = call.full(places)
    plain = mask & ~PLACE & 0xFF
    chosen = bool((mask & SAMPLES).any())
    if leads or chosen or call.backward or places.dtype not in INTEGERS:
        return plain
    return mask | (((mask & PLACE) != 0).to(torch.uint8) * ALL)


def _takes_turns(places: Tensor, size: int) -> bool:
    """Say whether indices name each row of a dimension, or the same entry of each row."""
    every = torch.unique(places)
    if not len(every) or size % len(every):
        return False
    each = size // len(every)
    rows = torch.arange(len(every), device=every.device)
    return bool((every // each == rows).all() and (every % each == every[0] % each).all())


def _moves_rows(call: Call, dim: int, *others: Any) -> bool:
    masks = [mask for one in others if (mask := call.mask(one)) is not None and mask.dim()]
    return any(varies(mask, dim % mask.dim()) for mask in masks)


def _piled(base: Tensor, add: Callable[[Tensor, Tensor], Tensor], source: Tensor) -> Tensor:
    """Return the mask of a sum of `source` into `base`, a bit at a time."""
    out = base.clone()
    for bit in range(8):
        one = (source >> bit) & 1
        if bool(one.any()):
            zeros = torch.zeros(base.shape, dtype=torch.int32, device=base.device)
            out |= (add(zeros, one.to(torch.int32)) > 0).to(torch.uint8) << bit
    return out


@rule("embedding")
def _embedded(call: Call) -> Found:
    table, places = call.args[:2]
    found = _placed(call, places, table).unsqueeze(-1)
    entries = _entries(call, table, places)
    return [found if entries is None else found | entries]


def _entries(call: Call, table: Tensor, places: Tensor) -> Tensor | None:
    """Return the mask of the entries of a table that are read; None where it has none."""
    mask = call.mask(table)
    if mask is None:
        return None
    if mask.shape[0] > 1:
        mask = mask.index_select(0, places.reshape(-1))
        return mask.reshape(*places.shape, mask.shape[-1])
    return mask.reshape([1] * places.dim() + [mask.shape[-1]])


@rule("embedding_renorm_")
def _entries_renormed(call: Call) -> Found:
    table, places = (call.mask(one) for one in call.args[:2])
    chosen = None if places is None else fold(places, range(places.dim())).reshape(1, 1)
    found = union([None if table is None else fold(table, [1]), chosen])
    return [None if found is None else found & ~PLACE & 0xFF]


@rule("_embedding_bag _embedding_bag_forward_only")
def _bagged(call: Call) -> Found:
    places, offsets = call.args[1], call.args[2]
    mask, ends = _placed(call, places, call.args[0]), offsets
    borders = call.full(offsets) & ~PLACE & 0xFF
    weights = call.mask(call.argument("per_sample_weights"))
    mask = (mask if weights is None else mask | weights)[:, None]
    entries = _entries(call, call.args[0], places)
    mask = mask if entries is None else mask | entries
    if not call.argument("include_last_offset", default=False):
        ends = torch.cat([offsets, offsets.new_tensor([len(places)])])
        borders = torch.cat([borders, borders.new_zeros(1)])
    bags = []
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        bags.append(fold(mask[begin:end], [0]))  # of none it is 0
    found = torch.cat(bags) | borders[:-1, None] | borders[1:, None]
    return [found] + [None] * (len(call.results) - 1)


@rule("gather")
def _gathered(call: Call) -> Found:
    x, dim, places = call.args[:3]
    got = call.full(x).gather(dim % max(x.dim(), 1), places)
    return [_read(got, call.mask(places)) | _placed(call, places, x)]


@rule("index_select")
def _chosen(call: Call) -> Found:
    x, dim, places = call.args[:3]
    dim %= max(x.dim(), 1)
    found = _read(call.full(x).index_select(dim, places.reshape(-1)), call.mask(places))
    return [found | sets.line_along(_placed(call, places, x, dim), dim, x.dim())]


@rule("index_add index_add_ index_copy index_copy_ _index_copy_ index_fill index_fill_")
def _added(call: Call) -> Found:
    x, dim, places, source = call.args[:4]
    dim %= max(x.dim(), 1)
    leads = _takes_turns(places, x.shape[dim]) if x.dim() else True
    leads |= _moves_rows(call, dim, x, source)
    found = sets.line_along(_written_at(call, places, leads=leads), dim, x.dim())
    if call.name in CHOICES:  # one value for all places
        if (mask := call.mask(source)) is not None:
            found = found | mask.reshape([1] * x.dim())
        size = [places.numel() if d == dim else n for d, n in enumerate(x.shape)]
        found = _unordered(found).expand(size).contiguous()
        return [call.full(x).index_copy(dim, places.reshape(-1), found)]
    found = _unordered(call.full(source) | found)
    return [_piled(call.full(x), lambda base, one: base.index_add_(dim, places, one), found)]


@rule("take")
def _picked(call: Call) -> Found:
    x, places = call.args[:2]
    return [call.full(x).reshape(-1)[places] | _placed(call, places, x)]


@rule("put put_")
def _put(call: Call) -> Found:
    x, places, source = call.args[:3]
    leads = _takes_turns(places, x.numel())
    leads |= any(map(varies_somewhere, map(call.mask, (x, source))))
    found = _written_at(call, places, leads=leads) | call.full(source).reshape(places.shape)
    flat, found = call.full(x).reshape(-1), _unordered(found).reshape(-1)
    put = torch.ops.aten.index_put.default
    add = bool(call.argument("accumulate", default=False))
    if add:
        got = _piled(flat, lambda base, one: put(base, [places.reshape(-1)], one, True), found)
    else:
        got = put(flat.contiguous(), [places.reshape(-1)], found)
    return [got.reshape(x.shape)]


@rule("scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ _scatter_reduce")
def _scattered(call: Call) -> Found:
    x, dim, places = call.args[:3]
    dim %= max(x.dim(), 1)
    source = call.argument("src", "value")
    lines = places.movedim(dim, -1).flatten(0, -2) if places.dim() > 1 else places.reshape(1, -1)
    leads = bool(x.dim()) and bool((lines == lines[:1]).all())
    leads = leads and _takes_turns(lines[:1], x.shape[dim])
    leads |= _moves_rows(call, dim, x, source)
    found = _written_at(call, places, leads=leads)
    if isinstance(source, Tensor) and source.dim():
        found = found | call.full(source)[tuple(slice(0, n) for n in places.shape)]
    found = _unordered(found)
    piled = _piled(call.full(x), lambda base, one: base.scatter_add_(dim, places, one), found)
    return [_lines(piled, dim, call.mask(places))]


def _lines(found: Tensor, dim: int, index: Tensor | None) -> Tensor:
    """Return the mask of lines of which one sample has chosen a place: it has left out the others.

    If several choose in one line, or places carry samples, the source decides.
    """
    if index is None or bool((index & PLACE).any()) or not found.dim():
        return found
    line = fold(found & SAMPLES, [dim % found.dim()])
    return found | torch.where((line & (line - 1)) == 0, line, 0)


@rule("masked_scatter masked_scatter_")
def _poured(call: Call) -> Found:
    x, chosen, source = call.args[:3]
    shape = call.results[0].shape
    chosen = chosen.expand(shape)
    flat = call.full(source).reshape(-1)
    found = (call.full(x).expand(shape) | call.full(call.args[1]).expand(shape)).clone()
    found[chosen] |= flat[: int(chosen.sum())]
    by = call.mask(call.args[1])
    if call.mask(source) is None and by is not None and sets.several(fold(by, range(by.dim()))):
        found[chosen] |= ALL  # of a table that belongs to none, each takes what others leave
    return [found & ~(LOOSE | PLACE) & 0xFF]


@rule("masked_scatter_backward")
def _poured_back(call: Call) -> Found:
    x, chosen, sizes = call.args[:3]
    chosen = chosen.expand(x.shape)
    count = call.results[0].numel()
    found = torch.zeros(count, dtype=torch.uint8, device=x.device)
    found[: int(chosen.sum())] = (call.full(x) | call.full(call.args[1]).expand(x.shape))[chosen]
    return [found.reshape(list(sizes))]


def collides(call: Call) -> bool:
    """Say whether samples write to places that they choose themselves, among those of others.

    A few rows may happen to choose different ones. Places that distinguish samples (an arange, an
    order, a mask of the rows) lead nowhere else.
    """
    if call.name in WRITES:
        dim, places = call.args[1:3]
        mask = call.mask(places)
        chosen = mask is not None and not bool((mask & PLACE).any()) and total(mask) & SAMPLES
        return bool(chosen) and mask is not None and mask.shape[dim % max(mask.dim(), 1)] > 1
    if call.name not in PUTS:
        return False
    found = [one for one in call.args[1] if one is not None and call.mask(one) is not None]
    free = [one for one in found if one.dtype not in (torch.bool, torch.uint8)]
    if len(free) < len(found):
        return False
    marks = [call.full(one) for one in free]
    varies = any(sets.several(fold(mask, range(mask.dim()))) for mask in marks)
    return varies and not any(bool((mask & PLACE).any()) for mask in marks)


def by_position(call: Call, rows: int) -> bool:
    """Say whether rows are read or written at some places only, which no sample has chosen.

    So many places as the forward has rows, or so many times as many, are those of all rows.
    """
    if call.name not in (WRITES | PUTS | CHOICES):
        return False
    integers = (t for t in tensors_in(call.args[1:]) if t.dtype in INTEGERS)
    masks = [(t.numel(), call.mask(t)) for t in integers]
    places = [n for n, mask in masks if mask is not None and total(mask) == PLACE]
    return any(n % rows for n in places)


def takes_no_place(call: Call) -> bool:
    """Say whether a kernel that takes places gets none."""
    operands = [*tensors_in(call.args[1:])]
    places = sum(one.numel() for one in operands if one.dtype in INTEGERS)
    return call.name in CHOICES | WRITES | PUTS and not places


def at_fixed_places(call: Call, *, square: bool = False) -> bool:
    """Say whether rows are read or written at places that no sample has chosen.

    So are all rows by an `arange` of them, until its length has shown that it is one. A diagonal of
    rows against rows counts if `square`: samples lie along both.
    """
    x = call.args[0] if call.args else None
    mask = call.mask(x)
    if not isinstance(x, Tensor) or mask is None or not x.dim():
        return False
    if call.name in DIAGONALS:
        dims = (0, 1) if call.name == "diagonal_scatter" else (-2, -1)
        lies = [mask.shape[d] > 1 and varies(mask, d % x.dim()) for d in dims if x.dim() > 1]
        return any(lies) and (square or not all(lies))
    if call.name in PUTS or call.name in ("index", "_unsafe_index"):
        return _indexes_rows(call, mask)
    if call.name not in WRITES | CHOICES | PLACES or call.name in ("take", "put"):
        return False
    dim = call.argument("dim", default=0) % x.dim()
    index = call.argument("index")
    free = not isinstance(index, Tensor) or call.mask(index) is None
    return free and mask.shape[dim] > 1 and varies(mask, dim)


def _indexes_rows(call: Call, mask: Tensor) -> bool:
    dim = 0
    for one in call.args[1]:
        spanned = one.dim() if one is not None and one.dtype in (torch.bool, torch.uint8) else 1
        free = one is not None and call.mask(one) is None
        if free and any(mask.shape[d] > 1 and varies(mask, d) for d in range(dim, dim + spanned)):
            return True
        dim += spanned
    return False


DIAGONALS = frozenset("tril triu tril_ triu_ diagonal_scatter".split())
PLACES = frozenset(("select_scatter", "slice_scatter"))
"""Kernels that write at a place which a number says."""

CHOICES = frozenset(
    "index _unsafe_index index_select gather index_fill index_fill_ take put".split()
)
WRITES = frozenset(
    "index_add index_add_ index_copy index_copy_ scatter scatter_ scatter_add scatter_add_ "
    "scatter_reduce scatter_reduce_".split()
)
PUTS = frozenset("index_put index_put_ _index_put_impl_ _unsafe_index_put".split())
AT_PLACES = WRITES | frozenset("index_fill index_fill_ put put_".split())
"""Kernels that write at places, one index for each."""


def _unordered(found: Tensor) -> Tensor:
    """Return the mask of elements written to chosen places: these are in no order any more.

    A place that is written as a number is still one, and its index shows the sample.
    """
    return found & ~LOOSE & 0xFF


@rule("index _unsafe_index index_put index_put_ _unsafe_index_put _index_put_impl_")
def _indexed(call: Call) -> Found:
    x, places = call.args[0], call.args[1]
    writes = "put" in call.name
    indices: list[Tensor | None] = []
    marks: list[Tensor] = []
    dims: list[int] = []
    chosen = False
    for one in places:
        if one is None:
            indices.append(None)
        elif one.dtype in (torch.bool, torch.uint8):
            for part in one.nonzero(as_tuple=True):
                dims.append(len(indices))
                indices.append(part)
            if call.mask(one) is not None:
                marks.append(call.full(one)[one.bool()] & ~PLACE & 0xFF)
            chosen = True
        else:
            dims.append(len(indices))
            indices.append(one)
            if call.mask(one) is not None:
                own = not writes or _puts_rows(call, one, len(indices) - 1)
                at = len(indices) - 1
                marks.append(
                    _written_at(call, one, leads=own) if writes else _placed(call, one, x, at)
                )
    got = torch.ops.aten.index.Tensor(call.full(x), indices)
    found = _of_places(got, indices, marks, dims)
    if not writes:
        for one in places:
            got = _read(got, call.mask(one))
        got = got | found
        return [got | (LOOSE if chosen and _among_samples(call) else 0)]
    source = _unordered(call.full(call.args[2]).expand(got.shape) | found)
    if call.argument("accumulate", default=False):
        put = torch.ops.aten.index_put_.default
        got = _piled(call.full(x), lambda base, one: put(base, indices, one, True), source)
    else:
        got = torch.ops.aten.index_put.default(call.full(x).contiguous(), indices, source)
    return [_left_out(call, got)]


def _puts_rows(call: Call, places: Tensor, dim: int) -> bool:
    """Say whether indices of a dimension lead to the rows of samples, or name each row alike."""
    x, every, source = call.args[:3]
    mask, value = call.mask(x), call.mask(source)
    if varies_somewhere(value) or (mask is not None and varies(mask, dim)):
        return True
    pure = [
        one
        for one in every
        if (m := call.mask(one)) is not None and bool((m & PLACE).any()) and not total(m) & SAMPLES
    ]
    return len(pure) < 2 and _takes_turns(places, x.shape[dim])


def _among_samples(call: Call) -> bool:
    """Say whether rows are chosen among those of several samples, however many are."""
    bools = [one for one in call.args[1] if one is not None and one.dtype in CHOOSERS]
    dim = next(at for at, one in enumerate(call.args[1]) if one is bools[0])
    mask = call.mask(call.args[0])
    dims = range(dim, dim + bools[0].dim())
    own = mask is not None and any(mask.shape[d] > 1 and varies(mask, d) for d in dims)
    return own or any(map(varies_somewhere, map(call.mask, bools)))


CHOOSERS = (torch.bool, torch.uint8)
"""Types of masks that choose."""


def _left_out(call: Call, got: Tensor) -> Tensor:
    """Return the mask after a write to chosen places: the omitted places depend on them, too."""
    dim = 0
    for one in call.args[1]:
        bools = one is not None and one.dtype in (torch.bool, torch.uint8)
        mask = call.mask(one)
        if bools and mask is not None:
            left = call.full(one) & SAMPLES
            after = [1] * (got.dim() - dim - one.dim())
            got = got | left.reshape([1] * dim + list(one.shape) + after)
        elif mask is not None:
            got = _lines(got, dim, mask)
        dim += one.dim() if bools else 1
    return got


def _of_places(
    got: Tensor, indices: list[Tensor | None], marks: list[Tensor], dims: list[int]
) -> Tensor:
    """Return the marks of indices, laid out as the elements that they read."""
    together = dims and dims == list(range(dims[0], dims[0] + len(dims)))
    at = dims[0] if together else 0
    every = [i.shape for i in indices if i is not None]
    shape = torch.broadcast_shapes(*every)  # type: ignore[no-untyped-call]
    if not marks:
        return torch.zeros((), dtype=torch.uint8, device=got.device)
    found = union(torch.broadcast_to(mark, shape) for mark in marks)
    assert found is not None
    return found.reshape(list(shape) + [1] * (got.dim() - at - len(shape)))
