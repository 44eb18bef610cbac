"""Check of a coupled function's arguments: rows, or the same for all micro-batches and ranks.

The function is called once, with the rows of all in place of one's own. All other arguments are
those of the micro-batch that happens to call it: a number that differs (``len(rows)``) would be
that of one of them, and a tensor without rows (class weights, prototypes) would be gathered as if
it had some, several times. The result shows neither: both are tested before.

    numbers, names, 0-dim tensors    the same for all, or refused
    tensors [m, ...]                 blocks that are one and the same for all are no rows: refused
"""

from __future__ import annotations

import cmath
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anybatch.core import tree
from anybatch.core.accelerator import home
from anybatch.errors import LossError
from anybatch.execution.captured import held
from anybatch.lockstep.batchnorm import BarrierKey
from anybatch.lockstep.gathered import Around

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
"""Types whose values can be written down, and compared with those of other processes."""


class CallRecord(NamedTuple):
    """Record of the arguments of a coupled function, except its rows.

    Attributes:
        name: of the function.
        samples: that the model was called with.
        words: paths of all arguments, and printable values; of its closure, too.
        numbers: the 0-dim tensors.
        objects: all else.
        alike: of each tensor with rows how many there are, where all are one and the same; else 0.
        did: the number of rows passed, its kernels and the numbers in them; empty if not inspected.
    """

    name: str
    samples: int
    words: str
    numbers: list[complex]
    objects: list[Any]
    alike: list[int]
    did: list[Any]


def record_call(
    name: str, fn: Callable[..., Any], arguments: Any, samples: int, *, rows: bool = False
) -> CallRecord:
    """Return a record of a function's arguments and held values; `rows` inspects its rows, too."""
    words, numbers, objects, alike = [], [], [], []
    for path, leaf in tree.leaves(arguments):
        words.append(path)
        if not isinstance(leaf, Tensor):
            words.append(repr(leaf) if isinstance(leaf, PLAIN) else "")
            objects += [] if isinstance(leaf, PLAIN) else [leaf]
        elif not leaf.dim():
            numbers.append(complex(leaf.detach()))
        elif rows:
            alike.append(len(leaf) if bool((leaf == leaf[:1]).all()) else 0)
    for path, leaf in held(fn):
        words += [path, repr(leaf) if isinstance(leaf, PLAIN) else ""]
        objects += [] if isinstance(leaf, PLAIN) else [leaf]
    return CallRecord(name, samples, " ".join(words), numbers, objects, alike, [])


def refuse_looks(calls: list[CallRecord]) -> None:
    """Compare the arguments of coupled functions in two forwards of different numbers of samples.

    Rows that are one and the same may be as many as the samples (a mask) or belong to none (weights
    of one), which micro-batches of one size cannot show; `refuse_constants` covers all others.

    Raises:
        LossError: something differs that has no rows, or equal rows are as many as before.
    """
    half, odd = divmod(len(calls), 2)
    for full, part in zip(calls[:half], calls[half:], strict=False):
        if odd or full.name != part.name or full.samples == part.samples:
            return
        if full.words != part.words or (full.did[:1] == part.did[:1] and full.did != part.did):
            raise _differs(full.name)
        if not all(map(_close, full.numbers, part.numbers)):  # len(x) as a tensor
            raise _differs(full.name)
        for one, other in zip(full.alike, part.alike, strict=False):
            if one == other and one > 1:
                raise _no_rows(full.name, f"with {one} rows for any number of samples,")


def meets_alike(name: str, fn: Callable[..., Any], arguments: Any, place: Around) -> None:
    """Compare the arguments without rows with those of all other micro-batches.

    Args:
        name: of the function.
        fn: the function.
        arguments: its arguments.
        place: where it is called.

    Raises:
        LossError: it differs.
    """
    assert place.meeting is not None
    own = record_call(name, fn, arguments, place.part)
    values: list[float] = [zlib.crc32(own.words.encode())]
    for number in own.numbers:
        values += [number.real, number.imag]
    device = next((tensor.device for tensor in tree.flat(arguments)), torch.device("cpu"))
    row = torch.tensor([values], dtype=torch.float64, device=home(device))
    where = BarrierKey(f"coupled {name}, with {len(own.numbers)} numbers", "alike")
    every, _ = place.meeting.gather(where, row[:0] if place.empty else row)

    def compare(parts: list[list[Any]]) -> list[bool]:
        first = parts[0]
        same = all(all(map(_is, one, first)) and len(one) == len(first) for one in parts)
        return [same] * len(parts)

    same = place.meeting.exchange(BarrierKey(f"coupled {name}", "objects"), own.objects, compare)
    if not (same and bool(((every == every[:1]) | every.isnan()).all())):
        raise _differs(name)


def _differs(name: str) -> LossError:
    return LossError(
        "arguments of a coupled function without rows, and the contents of its closure, must be "
        f"the same in all micro-batches, and {name} was called with other numbers, names or "
        "objects: compute len(rows), means and the like inside of it, where the rows are those of "
        "the whole batch"
    )


def _no_rows(name: str, what: str) -> LossError:
    return LossError(
        "arguments of a coupled function that have a dimension must hold rows, and one of "
        f"{name}, {what} belongs to no sample: let the function reach it without an argument where "
        "it is not trained (functools.partial), or compute with it before the call (similarities "
        "to prototypes, not prototypes; of a weight, fn(weight.square().sum()))"
    )


def _close(one: complex, other: complex) -> bool:
    return cmath.isclose(one, other, rel_tol=1e-6) or (cmath.isnan(one) and cmath.isnan(other))


def _is(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and _equal(one, other))


def _equal(one: Any, other: Any) -> bool:
    try:
        if isinstance(one, Tensor):
            return one.shape == other.shape and torch.equal(one, other)
        if isinstance(one, np.ndarray):
            return np.array_equal(one, other)
        return bool(one == other)
    except (RuntimeError, ValueError, TypeError):
        return False


def rows_and_memory(tensor: Tensor) -> tuple[int, Any]:
    """Return how many rows a tensor has, and where they begin; None for none of its own there."""
    count = len(tensor) if tensor.dim() else 0
    dense = count and tensor.numel() and tensor.layout is torch.strided
    if not dense or tensor.stride(0) == 0:  # one row, shown as several
        return count, None
    return count, (tensor.untyped_storage()._cdata, tensor.storage_offset())


def refuse_constants(
    name: str,
    own: tuple[Tensor, ...],
    every: list[Tensor],
    place: Around,
    parts: list[list[tuple[int, Any]]],
) -> None:
    """Refuse tensors that belong to no sample: parameters, and tensors that all pass alike.

    Rows of an argument may all be equal (a mask of ones), if as many as samples, or twice.

    Args:
        name: of the function.
        own: its tensors, in order.
        every: the rows of all for each of them.
        place: where it is called.
        parts: of each micro-batch, `rows_and_memory` of its tensors.

    Raises:
        LossError: there is one.
    """
    for one, full, each in zip(own, every, zip(*parts, strict=True), strict=True):
        if not one.dim() or place.empty:
            continue
        there = [begin for _, begin in each if begin is not None]
        shared = len(set(there)) < len(there) and max(len(one), place.part) > 1
        shared = shared or (one.is_leaf and one.requires_grad)
        as_many = len({count for count, _ in each}) == 1
        if shared or (as_many and _constant(one.detach(), full, place.part)):
            raise _no_rows(name, f"of shape {tuple(one.shape)},")


def _constant(own: Tensor, every: Tensor, samples: int) -> bool:
    count = len(own)
    if not own.numel() or len(every) == count or len(every) % count:
        return False
    blocks = every.reshape(-1, *own.shape)
    if not bool((blocks == own).all()):
        return False
    in_proportion = samples > 0 and count % samples == 0
    alike = not own.is_floating_point() or bool((own == own[:1]).all())
    return not (in_proportion and alike)
