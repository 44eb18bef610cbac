"""An optimizer's step in parts: the parameters of a part, and the bytes of their state.

The parts go through memory one behind the other, so that three of them fit at a time:

    part i-1 is written back │ part i is stepped │ part i+1 is read
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, optim

from anybatch.core.rounding import allocated
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError

AT_A_TIME = 3
"""Parts that are in memory while one is stepped: it, the one before it and the one behind it."""


@dataclass(frozen=True)
class StepPart:
    """Parameters that are stepped together.

    Attributes:
        members: ``(number of the group, parameter)``, in the order of the groups.
        size: bytes of their state, or a bound where it is not made yet.
    """

    members: tuple[tuple[int, Tensor], ...]
    size: int

    def groups(self, every: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups of an optimizer with only the parameters of this part."""
        found: dict[int, list[Tensor]] = {}
        for number, parameter in self.members:
            found.setdefault(number, []).append(parameter)
        return [{**every[number], "params": params} for number, params in found.items()]


def cut(sizes: Sequence[int], limit: int) -> list[range]:
    """Return consecutive parts of at most `limit` bytes each; a larger item is its own part.

    Args:
        sizes: of the items, in bytes.
        limit: bytes.

    Example:
        >>> cut([4, 4, 9, 1], 8)
        [range(0, 2), range(2, 3), range(3, 4)]
    """
    found, first, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            found.append(range(first, index))
            first, total = index, 0
        total += size
    return [*found, range(first, len(sizes))] if sizes else []


def widest(
    size_of: Callable[[dict[str, Any], Tensor], int], group: dict[str, Any], parameter: Tensor
) -> int:
    """Return the bytes of a parameter's state, or of itself and its gradient if they are more."""
    gradient = allocated(parameter.grad) if parameter.grad is not None else 0
    return max(size_of(group, parameter), allocated(parameter) + gradient)


def parts_of(
    optimizer: optim.Optimizer,
    size_of: Callable[[dict[str, Any], Tensor], int],
    resident_bytes: int,
) -> list[StepPart]:
    """Return the parts of an optimizer's step; parameters without a gradient are in none.

    Args:
        optimizer: whose step it is.
        size_of: group and parameter -> bytes of its state.
        resident_bytes: bytes of state that may be in memory at a time.

    Raises:
        BudgetError: the state of a single parameter needs more.
    """
    members, sizes = [], []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is not None:
                members.append((number, parameter))
                sizes.append(size_of(group, parameter))
    if max(sizes, default=0) > resident_bytes:
        shape = list(members[sizes.index(max(sizes))][1].shape)
        raise BudgetError(
            "the state of a parameter must fit in memory during its update, and that of one of "
            f"shape {shape} needs {show_bytes(max(sizes))}, and {show_bytes(resident_bytes)} is "
            f'there: give memory="{-(-max(sizes) // 1024)}KiB" or more',
            needed=max(sizes),
            budget=resident_bytes,
        )
    ranges = cut(sizes, resident_bytes // AT_A_TIME)
    return [StepPart(tuple(members[i] for i in one), sum(sizes[i] for i in one)) for one in ranges]
