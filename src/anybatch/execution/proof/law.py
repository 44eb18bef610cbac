"""Sizes and numbers of a call: the same for any number of samples, or so many for each of them.

Two forwards without data, of 48 samples and of 12, call the same functions in the same order. Then
each size is the same in both, or so many for each sample, and each number is the same, or one such
size. A cut at a fixed place, or at a part of the samples, keeps neither:

    48 samples   x [48, 7]   x[:8] [8, 7]    x.topk(48 // 5)   weight.select(0, 48 // 20)
    12 samples   x [12, 7]   x[:8] [8, 7]    x.topk(12 // 5)   weight.select(0, 12 // 20)
                                   of x [n, 7]: 8 of 48, and 8 of 12
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import isfinite
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from anybatch.memory.meter import tensors_in

VALUES = frozenset(
    "add sub mul div true_divide floor_divide remainder fmod pow rsub clamp clamp_min clamp_max "
    "where maximum minimum lerp addcmul addcdiv full full_like fill_ masked_fill eq ne lt le gt ge "
    "tensor as_tensor scalar_tensor new_tensor new_full "
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ "
    "__rtruediv__ __itruediv__ __rdiv__ __floordiv__ __mod__ __pow__ __rpow__ __eq__ __ne__ __lt__ "
    "__le__ __gt__ __ge__ __ifloordiv__ __imod__ __ipow__ add_ sub_ mul_ div_ true_divide_ "
    "floor_divide_ remainder_ fmod_ pow_ clamp_ clamp_min_ clamp_max_ lerp_ addcmul_ addcdiv_ "
    "masked_fill_ eq_ ne_ lt_ le_ gt_ ge_ norm renorm renorm_ cdist pdist linalg_norm "
    "linalg_vector_norm linalg_matrix_norm".split()
)
"""Functions that compute with the numbers they are given, which are no sizes."""

STEPS = frozenset(
    "floor_divide remainder fmod div clamp clamp_min clamp_max eq ne lt le gt ge bucketize "
    "__floordiv__ __mod__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __rshift__ __and__ "
    "bitwise_right_shift bitwise_and minimum maximum sum count_nonzero floor_divide_ remainder_ "
    "fmod_ div_ clamp_ clamp_min_ clamp_max_ eq_ ne_ lt_ le_ gt_ ge_ __ifloordiv__ __imod__ "
    "__irshift__ __iand__ bitwise_right_shift_ bitwise_and_".split()
)
"""Functions by which places of rows (``arange(n) // 8``) differ only where there are many rows."""

DIAGONALS = frozenset(("tril", "triu", "tril_", "triu_"))
"""Functions that select one side of a diagonal."""

FILLS = frozenset(("full", "new_full"))
"""Functions that are given a size and a number."""

CUTS = frozenset("slice select narrow split split_with_sizes tensor_split unbind chunk".split())
"""Kernels that return a part of their input."""


class Called(NamedTuple):
    """One call.

    Attributes:
        numbers: arguments from Python, in order; slices as their parts.
        words: parameters and buffers among the operands, by name; other values, written down.
        shapes: of the results, then of the tensors that are given.
        made: how many of `shapes` are results.
        free: it computes with tensors in which no sample has a part.
        places: and these may number the rows.
    """

    path: str
    name: str
    numbers: list[float]
    words: list[str]
    shapes: list[tuple[int, ...]]
    made: int
    trains: list[bool]
    free: bool
    places: bool = False


def called(
    path: str,
    name: str,
    arguments: tuple[Any, Any],
    result: Any,
    names: Mapping[int, str],
    outside: Callable[[Tensor], str] | None = None,
    *,
    free: bool = False,
    places: bool = False,
) -> Called:
    """Return the properties of a call that are compared.

    `names` has those of parameters and buffers, by id. `outside` names a tensor that was there
    before the forward, and is "" for another.
    """
    numbers, words, shapes = [], [], []
    for one in _leaves(_without_size(arguments) if name in FILLS else arguments):
        if isinstance(one, Tensor):
            word = names.get(id(one)) or ("" if outside is None else outside(one))
            words += [word] if word else []
            shapes.append(tuple(one.shape))
        elif isinstance(one, bool | str | None):
            words.append(repr(one))
        elif isinstance(one, int | float):
            numbers.append(one)
    results = [*tensors_in(result)]
    made = [tuple(one.shape) for one in results]
    trains = [one.requires_grad for one in results]
    return Called(path, name, numbers, words, made + shapes, len(made), trains, free, places)


def _without_size(arguments: Any) -> Any:
    """Return the arguments of a function that fills, without the size: its result has that."""
    args, kwargs = arguments
    if "fill_value" in kwargs:
        kwargs = {name: value for name, value in kwargs.items() if name != "size"}
        return [one for one in args if isinstance(one, Tensor)], kwargs
    return [one for one in args if isinstance(one, Tensor)], args[-1], kwargs


def _leaves(arguments: Any) -> Iterator[Any]:
    for one in tree_leaves(arguments):
        if isinstance(one, slice):
            yield from (one.start, one.stop, one.step)
        else:
            yield one


def breaks(full: Called, part: Called, n: int, m: int) -> bool:
    """Say whether a call breaks the rule of sizes."""
    if len(full.shapes) != len(part.shapes):
        full, part = _once(full), _once(part)
    alike = (full.path, full.name, full.words) == (part.path, part.name, part.words)
    if not alike or full.trains != part.trains or len(full.shapes) != len(part.shapes):
        return True
    shapes = zip(full.shapes, part.shapes, strict=True)
    if not all(_grows(a, b, n, m) for a, b in shapes):
        return True
    if len(full.numbers) != len(part.numbers) or (full.free and _steps(full, part, n)):
        return True
    made = full.shapes[: full.made]
    single = bool(made) and all(shape == () for shape in made)
    pairs = [*zip(full.numbers, part.numbers, strict=True)]
    if single != (full.name in VALUES):  # options of a loss, or what all samples are scaled by
        return not all(_same(a, b) for a, b in pairs)
    # Numbers without samples are those of any batch: a gate that is 0 at first hides them
    # (test_a_count_behind_a_gate_of_zero_is_a_doubt).
    fixed = full.free and made == part.shapes[: part.made]
    if fixed and (full.shapes[full.made :] or not single):
        return not all(_same(a, b) for a, b in pairs)
    if (full.name == "roll" and _rolls(full, part)) or _by_diagonal(full, part):
        return True
    return not all(_scales(a, b, n, m, inverse=single) for a, b in pairs)


def _grows(a: Sequence[int], b: Sequence[int], n: int, m: int) -> bool:
    if len(a) != len(b):
        return False
    return all(x == y or (x % n == 0 and x // n * m == y) for x, y in zip(a, b, strict=True))


def _same(a: float, b: float) -> bool:
    """Say whether two numbers are the same; NaN is NaN."""
    return a == b or (a != a and b != b)


def _scales(a: float, b: float, n: int, m: int, *, inverse: bool) -> bool:
    """Say whether a number is the same, or a size; of a single number also one over a size."""
    if _same(a, b):
        return True
    sizes = isinstance(a, int) and isinstance(b, int)
    if not (isfinite(a) and isfinite(b) and (sizes or inverse)):
        return False
    return (a % n == 0 and a // n * m == b) or (inverse and abs(a * n - b * m) <= 1e-9 * abs(a * n))


def _once(call: Called) -> Called:
    made = [shape for shape, _ in groupby(call.shapes[: call.made])]
    operands = [shape for shape, _ in groupby(call.shapes[call.made :])]
    trains = [one for one, _ in groupby(call.trains)]
    return call._replace(shapes=made + operands, made=len(made), trains=trains)


def _steps(full: Called, part: Called, n: int) -> bool:
    """Say whether places of rows, or a count of them, are compared or divided.

    Where each sample has several entries (``arange(n * 4) // 4``), a divisor of these is no step.
    """
    pairs = [*zip(full.shapes[full.made :], part.shapes[part.made :], strict=True)]
    each = [x // n for a, b in pairs for x, y in zip(a, b, strict=True) if x != y]
    if full.name not in STEPS or not each:
        return False
    if full.name in ("sum", "count_nonzero"):
        return full.shapes[: full.made] == part.shapes[: part.made]
    if not (full.places and part.places):
        return False
    return not (full.numbers and all(k and each[0] % k == 0 for k in full.numbers))


def _rolls(full: Called, part: Called) -> bool:
    """Say whether rows are rolled, or features by a count: a roll by 12 moves neither 4 nor 3."""
    shape, other = full.shapes[full.made], part.shapes[part.made]
    half = len(full.numbers) // 2
    dims = [int(d) for d in full.numbers[half:]] if half else range(len(shape))
    if any(shape[d] != other[d] for d in dims):
        return True
    return full.numbers != part.numbers


def _by_diagonal(full: Called, part: Called) -> bool:
    """Say whether rows lie along a diagonal by which a function cuts."""
    shape, other = full.shapes[full.made :][:1], part.shapes[part.made :][:1]
    return full.name in DIAGONALS and [s[-2:] for s in shape] != [s[-2:] for s in other]


# Path of the module that runs, found in the frames of Python on request.
#
# Hooks on modules would show it too, but torch calls a module with hooks by a closure, which holds
# its arguments with the frame of an error: after an out-of-memory error that memory is not freed.

CALL = nn.Module._call_impl.__code__
"""Every call of a module goes through it, and holds the module as `self`."""

BEGINS = frozenset(("forward", "backward", "trace"))
"""Functions of this package that run a model: frames around them are not part of it."""


class Paths:
    """Names the modules of a model.

    Attributes:
        outside: the name of what runs in none of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.outside = "forward"
        self._names = {id(module): name for name, module in model.named_modules()}

    def now(self) -> str:
        """Return the innermost module that runs in this thread; `outside` where none does."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is CALL:
                held = frame.f_locals
                module = held["self"]
                if type(held) is dict:  # before Python 3.13 the frame keeps it, and all arguments
                    held.clear()
                class_name, name = type(module).__name__, self._names.get(id(module), "")
                return f"{name} ({class_name})" if name else class_name
            inside = frame.f_globals.get("__name__", "").startswith("anybatch.execution.proof.")
            if inside and code.co_name in BEGINS:
                break
            frame = frame.f_back
        return self.outside
