"""Tensors that are as long as there are samples, and in which no sample has a part.

An `arange(len(x))` numbers the samples, an `eye` tells them apart, and noise of `x.shape` has a row
for each: what adds such a number to a row computes other things for the same row elsewhere, and
what takes the mean of such noise brings samples together. Their sizes give them away: the same call
is so many times longer where there are so many times more rows.

    4 rows    arange [4]    randn [4, 8]    zeros [3]
    2 rows    arange [2]    randn [2, 8]    zeros [3]       the first two belong to samples
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from anybatch.proof.masks import ALL, INTEGERS, PLACE

CONSTANT = frozenset(
    "empty zeros ones full new_empty new_zeros new_ones new_full empty_like zeros_like ones_like "
    "full_like empty_strided new_empty_strided zero_ fill_ scalar_tensor detach copy_".split()
)
"""Kernels whose numbers are all alike, or that have none yet."""

COUNTS = frozenset(("cumsum", "cumprod"))
"""Kernels that number what they make, even of ones."""

Shapes = tuple[tuple[int, ...], ...]


class Made(NamedTuple):
    """A kernel in which no sample has a part.

    Attributes:
        name: of it.
        gave: shapes of its results.
        took: shapes of its operands.
        made: the results of a reduction, which may be counts. Default: of other kernels none.
    """

    name: str
    gave: Shapes
    took: Shapes
    made: tuple[Tensor, ...] = ()


Lengths = Mapping[int, Made]
"""By the number of the call: kernels whose results are longer for more rows, as for fewer rows."""


def sized(whole: Mapping[int, Made], part: Mapping[int, Made]) -> Lengths | None:
    """Return the calls whose results are longer for more rows; None where other kernels come.

    Args:
        whole: calls of a forward, by number.
        part: those of the same forward on fewer rows, in the same order.
    """
    if [made.name for made in whole.values()] != [made.name for made in part.values()]:
        return None
    pairs = zip(whole.items(), part.values(), strict=True)
    return {at: fewer for (at, made), fewer in pairs if made.gave != fewer.gave}


def counted_in(whole: Mapping[int, Made], part: Mapping[int, Made]) -> str:
    """Return a kernel that makes other numbers, as many, of more rows than of fewer; "" if none.

    Args:
        whole: calls of a forward, by number.
        part: those of the same forward on fewer rows, in the same order.
    """
    pairs = zip(whole.values(), part.values(), strict=False)
    every = ((a.name, *one) for a, b in pairs for one in zip(a.made, b.made, strict=False))
    return next((name for name, x, y in every if x.shape == y.shape and not torch.equal(x, y)), "")


def shapes(tensors: Iterable[Tensor]) -> Shapes:
    """Return the shapes of tensors; of what has none, such as nested rows, nothing."""
    return tuple(tuple(t.shape) if plain(t) else () for t in tensors)


def scalars(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the numbers that Python gives to a kernel which computes with them.

    Whole numbers are sizes and dimensions too: of these only what a pointwise kernel is given.
    """
    if "batch_norm" in func._schema.name:  # its momentum counts the batches
        return ()
    kinds = (int, float) if torch.Tag.pointwise in func.tags else (float,)
    every = (*args, *(value for _, value in sorted(kwargs.items())))
    return tuple(value for value in every if type(value) in kinds)


def plain(tensor: Tensor) -> bool:
    """Say whether a tensor has numbers that can be compared, in rows."""
    return (
        tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_nested)
        and type(tensor) in (Tensor, Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not tensor._is_zerotensor()  # which has no memory: to read it kills the process
        and (not tensor.numel() or tensor.data_ptr() != 0)
    )


def marks(
    func: Any, tensor: Tensor, fewer: Sequence[int], samples: Sequence[int], rows: int, *, own: bool
) -> Tensor | None:
    """Return the mask of such a tensor: the samples that its rows stand for.

    Args:
        func: the kernel that has made it.
        tensor: of a forward of all rows.
        fewer: its shape for fewer rows.
        samples: the sample that each row of the forward stands for.
        rows: how many fewer rows were.
        own: it was made of nothing that is as long as there are rows: its numbers are places.
    """
    n, found = len(samples), None
    if not plain(tensor) or tensor.dim() != len(fewer):
        return None
    random = torch.Tag.nondeterministic_seeded in func.tags  # a look may have it draw all alike
    places = not random and (own or func._schema.name.split("::")[1] in COUNTS)
    for d, (size, less) in enumerate(zip(tensor.shape, fewer, strict=True)):
        if size == less or not (random or _tells(tensor, d, n)):
            continue
        if (size, less) == (n, rows):
            bits = [1 << sample for sample in samples]
        elif size * rows == less * n:  # several rows a sample, in an order that nobody knows
            bits = [PLACE if places else 0] * size
        else:
            bits = [0 if random else ALL] * size
        line = torch.tensor(bits, dtype=torch.uint8, device=tensor.device)
        line = line.reshape([-1 if d == k else 1 for k in range(tensor.dim())])
        found = line if found is None else found | line
    if found is None or not places:
        return found
    if tensor.dtype in INTEGERS:  # they may yet lead to a row of their own
        return torch.full_like(found, PLACE)
    return found | PLACE


def _tells(tensor: Tensor, dim: int, n: int) -> bool:
    """Say whether numbers differ between samples: heads that are repeated for each do not."""
    size = tensor.shape[dim]
    if size % n:
        return _differs(tensor, dim)
    before = tensor.unflatten(dim, (n, size // n))  # type: ignore[no-untyped-call]
    after = tensor.unflatten(dim, (size // n, n))  # type: ignore[no-untyped-call]
    return _differs(before, dim) and _differs(after, dim + 1)


def _differs(tensor: Tensor, dim: int) -> bool:
    return bool((tensor != tensor.narrow(dim, 0, 1)).any())
