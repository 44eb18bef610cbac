"""Tensors that are as long as there are samples, and in which no sample has a part.

An `arange(len(x))` numbers the samples, an `eye` distinguishes them, and noise of `x.shape` has a
row for each: adding such a number to a row computes another result for the same row elsewhere, and
a mean of such noise combines samples. They are recognised by their sizes: the result of the same
call grows in proportion to the rows.

    4 rows    arange [4]    randn [4, 8]    zeros [3]
    2 rows    arange [2]    randn [2, 8]    zeros [3]       the first two belong to samples
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from anybatch.core.accelerator import home
from anybatch.execution.proof.kernel_call import CUTS, Call, kernel
from anybatch.execution.proof.masks import ALL, INTEGERS, PLACE, line_along
from anybatch.memory.meter import tensors_in

CONSTANT = frozenset(
    "empty zeros ones full new_empty new_zeros new_ones new_full empty_like zeros_like ones_like "
    "full_like empty_strided new_empty_strided zero_ fill_ scalar_tensor detach copy_".split()
)
"""Kernels whose numbers are all alike, or that have none yet."""

FILLS = frozenset(
    "zeros ones full new_zeros new_ones new_full zeros_like ones_like full_like".split()
)
"""Functions and kernels that make a tensor of one number, which every part of it is of, too."""

COPIES = frozenset(("_to_copy", "clone"))
"""Kernels that give the numbers they are given."""

MOST = 1 << 22
"""Size of an operand up to which a kernel is tested with other values in it."""

Shapes = tuple[tuple[int, ...], ...]


class Made(NamedTuple):
    """A kernel in which no sample has a part.

    Attributes:
        took: shapes of its operands, and of the bases of those it writes to.
        made: the results of a reduction, which may be counts. Default: of other kernels none.
        first: the first number of each result that is no view, and computes with several.
    """

    name: str
    gave: Shapes
    took: Shapes
    made: tuple[Tensor, ...] = ()
    first: tuple[Tensor, ...] = ()


Lengths = Mapping[int, Made]
"""By the number of the call: kernels with longer tensors for more rows, as for fewer rows."""


def sized(full: Mapping[int, Made], part: Mapping[int, Made]) -> Lengths | None:
    """Return the calls with tensors that are longer for more rows; None if the kernels differ."""
    if [made.name for made in full.values()] != [made.name for made in part.values()]:
        return None
    pairs = zip(full.items(), part.values(), strict=True)
    return {at: few for (at, made), few in pairs if (made.gave, made.took) != (few.gave, few.took)}


def counted_in(full: Mapping[int, Made], part: Mapping[int, Made]) -> str:
    """Return a kernel that makes other numbers, as many, of more rows than of fewer; "" if none."""
    pairs = zip(full.values(), part.values(), strict=False)
    every = ((a.name, *one) for a, b in pairs for one in zip(a.made, b.made, strict=False))
    return next((name for name, x, y in every if x.shape == y.shape and not _rounded(x, y)), "")


def shapes(tensors: Iterable[Tensor]) -> Shapes:
    """Return the shapes of tensors; () for a tensor without one, such as nested rows."""
    return tuple(tuple(t.shape) if plain(t) else () for t in tensors)


def scalars(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the numbers that Python gives to a kernel which computes with them.

    Integers are sizes and dimensions too: of these only arguments of pointwise kernels.
    """
    facts = kernel(func)
    if "batch_norm" in facts.name:  # its momentum counts the batches
        return ()
    kinds = (int, float) if facts.pointwise else (float,)
    every = (*args, *(value for _, value in sorted(kwargs.items()))) if kwargs else args
    return tuple(value for value in every if type(value) in kinds)


PLAIN = frozenset((Tensor, Parameter))
"""Types of tensors that may have numbers in rows."""


def plain(tensor: Tensor) -> bool:
    """Say whether a tensor has numbers that can be compared, in rows."""
    return in_rows(tensor) and (not tensor.numel() or tensor.data_ptr() != 0)


def in_rows(tensor: Tensor) -> bool:
    """Say whether a tensor is one in rows, and no stand-in; its memory may be elsewhere.

    Its address is not read: an offloaded weight would be made resident.
    """
    return (
        type(tensor) in PLAIN  # none that waits for its first input
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and not (tensor.is_quantized or tensor.is_nested)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not tensor._is_zerotensor()  # which has no memory: to read it kills the process
    )


def _tells(tensor: Tensor, dim: int, n: int) -> bool:
    """Say whether numbers differ between samples: heads that are repeated for each do not."""
    size = tensor.shape[dim]
    if size % n:
        return _differs(tensor, dim)
    before = tensor.unflatten(dim, (n, size // n))  # type: ignore[no-untyped-call]
    after = tensor.unflatten(dim, (size // n, n))  # type: ignore[no-untyped-call]
    return _differs(before, dim) and _differs(after, dim + 1)


def _differs(tensor: Tensor, dim: int) -> bool:
    return tensor.shape[dim] > 0 and bool((tensor != tensor.narrow(dim, 0, 1)).any())


class FreeCall:
    """A kernel in which no sample has a part, and which has longer tensors for more rows.

    Its `written` tensors can be read. `trained` says whether a tensor may have other numbers later.
    """

    def __init__(
        self, call: Call, written: Sequence[Tensor], fewer: Made, trained: Callable[[Tensor], bool]
    ) -> None:
        self._call, self._written, self._fewer, self._trained = call, written, fewer, trained
        # A look may have it draw all alike.
        self._random = kernel(call.func).draws
        shapes = zip((*call.operands, *bases(written)), fewer.took, strict=False)
        # The dimensions that are longer for more rows.
        self._longer = {
            id(one): [
                d for d, n in enumerate(shape) if len(shape) == one.dim() and n != one.shape[d]
            ]
            for one, shape in shapes
        }

    @property
    def cuts(self) -> bool:
        """Whether it may take a part of tensors that are longer for more rows."""
        return self._call.name in CUTS and any(self._longer.values())

    @cached_property
    def outside(self) -> bool:
        """Whether it takes numbers, one for each row, that no kernel has made.

        Results of a kernel on others are places.
        """
        written = {id(one) for one in self._written}
        operands = [one for one in self._call.operands if id(one) not in written]
        if not all(map(plain, operands)):  # sparse rows: nobody knows how many they are
            return True
        return any(_differs(one, d) for one in operands for d in self._longer[id(one)])

    def marks(self, at: int, samples: Sequence[int], rows: int) -> Tensor | None:
        """Return the mask of result `at`: the samples that its rows stand for.

        Of each of its rows there is a sample; of the fewer ones there were `rows`.
        """
        tensor, fewer = self._call.results[at], self._fewer.gave[at]
        n, found = len(samples), None
        if not plain(tensor) or tensor.dim() != len(fewer):
            return None
        places = not (self._random or self.outside)
        for d, (size, less) in enumerate(zip(tensor.shape, fewer, strict=True)):
            if size == less or not (self._random or _tells(tensor, d, n) or self._other(at, d, n)):
                continue
            if (size, less) == (n, rows):
                bits = [1 << sample for sample in samples]
            elif size * rows == less * n:  # several rows a sample, in an order that nobody knows
                bits = [PLACE if places else 0] * size
            else:
                bits = [0 if self._random else ALL] * size
            line = torch.tensor(bits, dtype=torch.uint8, device=tensor.device)
            line = line_along(line, d, tensor.dim())
            found = line if found is None else found | line
        if found is None or not places:
            return found
        if tensor.dtype in INTEGERS:  # they may yet lead to a row of their own
            return torch.full_like(found, PLACE)
        return found | PLACE

    def rows(self) -> Call:
        """Return the call with a mask for each longer tensor, which varies along these rows."""
        found = {}
        for one in self._call.operands:
            dims = self._longer[id(one)]
            if not dims:
                continue
            each = torch.zeros([1] * one.dim(), dtype=torch.uint8, device=one.device)
            for d in dims:
                line = torch.arange(one.shape[d], dtype=torch.uint8, device=one.device)
                each = each + line_along(line, d, one.dim())
            found[id(one)] = torch.bitwise_left_shift(torch.ones_like(each), each % 4)
        return replace(self._call, masks=found)

    def writes_some(self) -> bool:
        """Say whether it writes to some rows and not to others: to a view of some."""
        return any(
            base is not None and self._longer.get(id(base)) and self._some_of(one, base)
            for one in self._written
            for base in [one._base]
        )

    def _some_of(self, part: Tensor, base: Tensor) -> bool:
        """Say whether a view omits entries of its base along those dimensions."""
        if not part.numel() or part.dtype != base.dtype or not (plain(part) and plain(base)):
            return bool(base.numel())
        size = base.untyped_storage().nbytes() // base.element_size()
        flags = torch.zeros(size, dtype=torch.bool, device=base.device)
        flags.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(True)
        found = flags.as_strided(base.shape, base.stride(), base.storage_offset())
        return any(_differs(found, d) for d in self._longer[id(base)])

    def _other(self, at: int, dim: int, n: int) -> bool:
        """Say whether other values of its operands would differ: in result `at`, along `dim`.

        A table of zeros is one like any other. Numbers that are never trained, and are the same
        along a dimension, remain so.
        """
        operands, func = self._call.operands, self._call.func
        never = self._random or func._schema.is_mutable or kernel(func).pointwise
        if never or not operands or not all(map(plain, operands)):
            return False
        if kernel(func).aliases and not self._longer[id(operands[0])]:
            return self._lies(operands[0], self._call.results[at], dim)
        return at < len(self._of_others) and _tells(self._of_others[at], dim, n)

    def counts(self, at: int) -> bool:
        """Say whether result `at`, which is alike for all rows, is another where there are more."""
        fewer = self._fewer.first
        if self._random or at >= len(fewer) or not any(self._longer.values()):
            return False
        first = firsts(self._call.func, [self._call.results[at]])
        return bool(first) and not self.outside and not _rounded(first[0], fewer[at])

    def _lies(self, x: Tensor, view: Tensor, dim: int) -> bool:
        """Say whether a view has other entries of a tensor from place to place."""
        step = view.stride(dim)
        if not step or view.shape[dim] < 2:
            return False
        along = [d for d in range(x.dim()) if x.stride(d) == step]
        return self._trained(x) or not along or any(_differs(x, d) for d in along)

    @cached_property
    def _of_others(self) -> list[Tensor]:
        """The results of the kernel for other values, which no generator draws."""
        if any(one.numel() > MOST for one in self._call.operands):
            return []
        others: dict[int, Tensor] = {}
        for at, one in enumerate(self._call.operands):
            if one.is_floating_point() and id(one) not in others:
                alike = set(self._longer[id(one)])
                if not self._trained(one):
                    alike |= {d for d in range(one.dim()) if not _differs(one, d)}
                others[id(one)] = _others(one, alike, at)

        def instead(value: Any) -> Any:
            return others.get(id(value), value)

        args, kwargs = tree_map(instead, (self._call.args, self._call.kwargs))
        try:
            found = [*tensors_in(self._call.func(*args, **kwargs))]
        except (RuntimeError, ValueError, NotImplementedError):
            return []
        finite = all(bool(one.isfinite().all()) for one in found if one.is_floating_point())
        return found if finite else []


def _rounded(one: Tensor, other: Tensor) -> bool:
    """Say whether two numbers are one but for rounding: a product is added up by blocks of rows."""
    if not one.is_floating_point() or one.shape != other.shape or one.dtype != other.dtype:
        return torch.equal(one, other)
    eps = torch.finfo(one.dtype).eps
    bound = eps * (DIGITS if eps < HALF else 2)
    return torch.allclose(one, other, rtol=bound, atol=bound, equal_nan=True)


DIGITS = 32
"""Rounding of sums of a few hundred numbers; a count of 3 and of 4 rows is far off."""

HALF = 1e-4
"""Between the rounding of half precision, which adds up in float32, and that of all else."""


def firsts(func: Any, made: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the first number of each result of a kernel that brings numbers together."""
    facts = kernel(func)
    if facts.aliases or facts.pointwise or not all(map(plain, made)):
        return ()
    with _disable_current_modes():
        return tuple(one.detach().reshape(-1)[:1].clone() for one in made)


def bases(written: Iterable[Tensor]) -> list[Tensor]:
    """Return the base tensors of views."""
    return [base for one in written if (base := one._base) is not None]


def _others(tensor: Tensor, alike: set[int], seed: int) -> Tensor:
    """Return numbers between 0.1 and 0.9 that differ along all dimensions but those."""
    shape = [1 if d in alike else size for d, size in enumerate(tensor.shape)]
    count = torch.Size(shape).numel()
    steps = torch.arange(count, dtype=torch.float64, device=home(tensor.device))
    numbers = ((steps + 1) * 0.7548776662 + seed * 0.5698402909) % 1 * 0.8 + 0.1
    return numbers.to(tensor.device, tensor.dtype).reshape(shape).expand(tensor.shape)


# Tensors in which no sample has a part, and which of them may number the rows.
#
# An `arange(len(x))` that is divided or compared distinguishes the first rows from later ones.
# Draws and constants do not, after any computation element by element; nor do tensors without a
# dimension as long as there are rows, or several times as long.
#
#     arange(n) // 8    ones(n).cumsum(0) > 8    ones(n, 5).sum(0) > 8      by places, by a count
#     rand(n) < 0.1     ones(n, 5).cumsum(1) / 2   full((n,), 3) == 0       neither

MAKERS = frozenset(
    "empty zeros ones full rand randn randint normal bernoulli poisson empty_like zeros_like "
    "ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full "
    "normal_ uniform_ bernoulli_ random_ exponential_ zero_ fill_".split()
)
"""Functions that make numbers which are drawn, or all alike."""

ELEMENTWISE = frozenset(
    "add sub mul div true_divide floor_divide remainder fmod pow rsub clamp clamp_min clamp_max "
    "where maximum minimum lerp masked_fill eq ne lt le gt ge neg abs exp log log1p log2 sqrt "
    "rsqrt sin cos tan tanh sigmoid relu square round floor ceil sign reciprocal logical_not "
    "logical_and logical_or logical_xor isnan isinf isfinite bitwise_not invert and or xor not "
    "radd rsub rmul rtruediv truediv floordiv rfloordiv mod rpow iadd isub imul itruediv get "
    "getitem select narrow unsqueeze squeeze view view_as reshape flatten unflatten transpose "
    "permute movedim swapaxes contiguous clone detach to float double half bfloat16 long int "
    "bool type type_as requires_grad expand expand_as broadcast_to broadcast_tensors repeat t "
    "mT bitwise_and bitwise_or".split()
)
"""Functions that number nothing themselves, and of which each entry comes of one of an operand."""

SPREADS = frozenset("expand expand_as broadcast_to broadcast_tensors repeat".split())
"""Functions that give one entry to each row."""

ALONG = frozenset(
    "sum mean prod amax amin cumsum cumprod softmax log_softmax norm logsumexp std var any all "
    "argmax argmin flip count_nonzero diff".split()
)
"""Functions that reduce or mix along dimensions."""


class _Free(NamedTuple):
    """A tensor in which no sample has a part; it distinguishes no rows, or is of one number."""

    tensor: Callable[[], Tensor | None]
    free: bool
    plain: bool
    filled: bool


_UNKNOWN = _Free(lambda: None, False, False, False)


class FreeTensors:
    """Record of the tensors in which no sample has a part."""

    def __init__(self, names: Mapping[int, str], rows: int) -> None:
        self._names, self._rows = names, rows
        self._free: dict[int, _Free] = {}

    def takes(self, name: str, arguments: Any) -> bool:
        """Return whether no sample has a part in the result of a function."""
        if name.startswith("new_") or name.endswith("_like"):
            return True
        return all(
            id(one) in self._names or self._record(one).free for one in tensors_in(arguments)
        )

    def numbers(self, arguments: Any) -> bool:
        """Say whether some tensor among arguments may number the rows."""
        return any(map(self._may_number, tensors_in(arguments)))

    def gave(self, name: str, arguments: Any, result: Any, *, free: bool) -> None:
        """Record the results of a function, or the tensor that it writes to."""
        made = [*tensors_in(result)]
        if name == "__setitem__":
            made = [arguments[0][0]]
        name = name.split(".", maxsplit=1)[0]
        for one in made:
            filled = free and self._is_filled(name, arguments)
            plain = filled or (free and self._is_plain(name, arguments, one))
            writes = name == "__setitem__" or (name.endswith("_") and name[:2] != "__")
            base = one._base if writes else None
            for other in (one, base) if base is not None else (one,):
                self.forget(other)
                if free:
                    self._free[id(other)] = _Free(weakref.ref(other), True, plain, filled)

    def forget(self, tensor: Tensor) -> None:
        """Take in that samples have a part in a tensor."""
        self._free.pop(id(tensor), None)

    def _record(self, tensor: Tensor) -> _Free:
        found = self._free.get(id(tensor), _UNKNOWN)
        return found if found.tensor() is tensor else _UNKNOWN

    def _is_filled(self, name: str, arguments: Any) -> bool:
        if name in FILLS:
            return True
        operands = [*tensors_in(arguments)]
        if name == "__getitem__":  # places that lead there tell nothing
            operands = operands[:1]
        bare = name.strip("_")
        alike = bare in ELEMENTWISE or bare in SPREADS
        return alike and bool(operands) and all(self._record(one).filled for one in operands)

    def _is_plain(self, name: str, arguments: Any, made: Tensor) -> bool:
        if name in MAKERS or not self._has_rows(made):
            return True
        bare = name.strip("_")
        operands = [*tensors_in(arguments)]
        if name == "__getitem__" and operands and self._leads_to_rows(*arguments[0]):
            operands = operands[:1]
        if not operands or any(self._may_number(one) for one in operands):
            return False
        if name == "__setitem__":
            return True
        grows = not any(self._has_rows(one) for one in operands)
        if bare in ALONG:
            return not grows and self._keeps_rows(operands[0], arguments)
        return bare in (SPREADS if grows else ELEMENTWISE)

    def _leads_to_rows(self, source: Tensor, index: Any) -> bool:
        """Return whether places that may number rows index rows only: equal rows remain equal."""
        places = index if isinstance(index, tuple) else (index,)
        if any(one is None or one is Ellipsis for one in places):
            return False
        dims = [d for d, one in enumerate(places) if isinstance(one, Tensor)]
        numbering = [d for d in dims if self._may_number(places[d])]
        integers = all(places[d].dtype != torch.bool for d in dims)
        return (
            bool(numbering)
            and integers
            and all(d < source.dim() and source.shape[d] % self._rows == 0 for d in numbering)
        )

    def _may_number(self, tensor: Tensor) -> bool:
        return self._has_rows(tensor) and not self._record(tensor).plain

    def _has_rows(self, tensor: Tensor) -> bool:
        return any(size and size % self._rows == 0 for size in tensor.shape)

    def _keeps_rows(self, x: Tensor, arguments: Any) -> bool:
        """Return whether a function combines values along no dimension of rows."""
        args, kwargs = arguments
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        dims = [dims] if isinstance(dims, int) else dims
        if not isinstance(dims, list | tuple) or not dims:
            return False
        return all(isinstance(d, int) and x.shape[d] % self._rows for d in dims)
