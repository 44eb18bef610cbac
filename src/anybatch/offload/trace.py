"""A training step as the out-of-core paper sees it: a row of functions, and the variables they use.

    functions   f0          f1          f2  ...            forward, loss, backward, update
    variables   x w a       a w b       b ...              read, written in place, or made
                                ^ a's last use: its bytes are free after f1, or at the next one

A trace is data. It does not contain where a variable is; a schedule decides that.

Source: Hayakawa and Narihira, "Out-of-core training", sections 2 and 3, Figure 1: function-sequence
and variable-sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

NEVER = 1 << 60
"""Result of `Trace.next_use` for a variable that no later function uses."""


@dataclass(frozen=True)
class Variable:
    """Bytes that live and die together, such as a tensor's storage.

    Attributes:
        name: its name for users.
        size: bytes.
        before: it is on the device when the step begins.
        after: it must be there when the step ends, so it never dies.
        stays: it is never offloaded; a copy of a few bytes costs more than it frees.
        host: where it is before and after the step, it is on the host then, not on the device.
    """

    name: str
    size: int
    before: bool = False
    after: bool = False
    stays: bool = False
    host: bool = False


@dataclass(frozen=True)
class Function:
    """One kernel of the step.

    Attributes:
        name: its name for users.
        reads: variables it needs, by their place in `Trace.variables`; also those it writes to.
        makes: variables that begin with it.
        writes: those of `reads` that it changes in place.
        flops: floating-point operations.
        touched: bytes it reads and writes.
        seconds: how long it takes once its variables are there.
        backward: it comes after the forward pass.
        draws: it takes random numbers, so that it gives something else the second time.
        again: it has run before, and its result of then was dropped.
    """

    name: str
    reads: tuple[int, ...]
    makes: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    flops: float = 0.0
    touched: int = 0
    seconds: float = 0.0
    backward: bool = False
    draws: bool = False
    again: bool = False

    @property
    def uses(self) -> tuple[int, ...]:
        """Return the variables that must be resident while the function runs."""
        return self.reads + self.makes


@dataclass(frozen=True, eq=False)
class Trace:
    """A step: its variables, and its functions in order.

    Raises:
        ValueError: a variable is used before it is made, made twice, written but not read, or on
            the host between steps and not there before and after.
    """

    variables: tuple[Variable, ...]
    functions: tuple[Function, ...]

    def __post_init__(self) -> None:
        made = {v for v, variable in enumerate(self.variables) if variable.before}
        for one in self.variables:
            if one.host and (one.stays or not (one.before and one.after)):
                raise ValueError(
                    "a variable on the host between steps must be there before and after them and "
                    f"not on the device, and {one.name} is not so: set before and after"
                )
        for i, function in enumerate(self.functions):
            for v in function.reads:
                self._require(v in made, v, i, "made before it is used")
            for v in function.makes:
                self._require(v not in made, v, i, "made once")
            self._require(set(function.writes) <= set(function.reads), 0, i, "read where written")
            made.update(function.makes)

    def _require(self, holds: bool, v: int, i: int, what: str) -> None:  # noqa: FBT001
        if not holds:
            raise ValueError(
                f"a variable must be {what}, and function {i}, {self.functions[i].name}, breaks "
                f"this for {self.variables[v].name}: give the functions in their order"
            )

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """Variable -> the functions that use it, in order."""
        found: list[list[int]] = [[] for _ in self.variables]
        for i, function in enumerate(self.functions):
            for v in dict.fromkeys(function.uses):
                found[v].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def written(self) -> tuple[tuple[int, ...], ...]:
        """Variable -> the functions that make it or write to it, in order."""
        found: list[list[int]] = [[] for _ in self.variables]
        for i, function in enumerate(self.functions):
            for v in dict.fromkeys(function.makes + function.writes):
                found[v].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def dies(self) -> tuple[tuple[int, ...], ...]:
        """Return function -> the variables that are not needed after it."""
        found: list[list[int]] = [[] for _ in self.functions]
        for v, uses in enumerate(self.uses):
            if uses and not self.variables[v].after:
                found[uses[-1]].append(v)
        return tuple(map(tuple, found))

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Return the variables that are there when the step begins, but for those of no use."""
        return tuple(
            v
            for v, variable in enumerate(self.variables)
            if variable.before and not variable.host and (variable.after or self.uses[v])
        )

    @cached_property
    def hosted(self) -> tuple[int, ...]:
        """Return the variables that begin on the host, and end there."""
        return tuple(v for v, one in enumerate(self.variables) if one.host and self.uses[v])

    @cached_property
    def after(self) -> tuple[int, ...]:
        """Return the variables that must be on the device when the step ends."""
        return tuple(v for v, one in enumerate(self.variables) if one.after and not one.host)

    @cached_property
    def in_the_end(self) -> int:
        """Bytes at the end of the step without offloading."""
        return self.bytes_of(self.after) + self.bytes_of(self.hosted)

    @cached_property
    def seconds(self) -> float:
        """Seconds of all functions."""
        return sum(function.seconds for function in self.functions)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Live bytes during each function without offloading."""
        held, found = self.bytes_of(self.before) + self.bytes_of(self.hosted), []
        for function, dead in zip(self.functions, self.dies, strict=True):
            held += self.bytes_of(function.makes)
            found.append(held)
            held -= self.bytes_of(dead)
        return tuple(found)

    @property
    def peak(self) -> int:
        """Return the peak of the live bytes: the need of the step without a schedule."""
        return max(self.live, default=0)

    @cached_property
    def floor(self) -> int:
        """Return the least bytes of any schedule: one function, and variables never offloaded."""
        held = self.bytes_of(v for v in self.before if self.variables[v].stays)
        begins = self.functions[0].makes if self.functions else ()
        first = self.bytes_of(self.before) + self.bytes_of(begins)
        most = max(held, first)  # nothing has left yet when the first function runs
        for function, dead in zip(self.functions, self.dies, strict=True):
            held += self.bytes_of(v for v in function.makes if self.variables[v].stays)
            moving = (v for v in set(function.uses) if not self.variables[v].stays)
            most = max(most, held + self.bytes_of(moving))
            held -= self.bytes_of(v for v in dead if self.variables[v].stays)
        return max(most, self.bytes_of(self.after))

    def size(self, v: int) -> int:
        """Return the bytes of a variable."""
        return self.variables[v].size

    def bytes_of(self, variables: Iterable[int]) -> int:
        """Return the bytes of variables together."""
        return sum(self.variables[v].size for v in variables)

    def next_use(self, v: int, i: int) -> int:
        """Return the first function after `i` that uses `v`.

        Returns:
            The number of functions where none does and `v` must be there at the end, one more
            where it must be on the host then; `NEVER` where `v` is dead.
        """
        uses = self.uses[v]
        place = bisect_right(uses, i)
        if place < len(uses):
            return uses[place]
        return len(self.functions) + self.variables[v].host if self.variables[v].after else NEVER

    def with_states_on_the_host(self) -> Trace:
        """Return the same step with its persistent variables on the host before and after it.

        These are parameters, statistics and optimizer states; so the floor of a step on the device
        contains only the states of one function.
        """
        return Trace(
            tuple(replace(v, host=v.before and v.after and not v.stays) for v in self.variables),
            self.functions,
        )

    def with_seconds(self, seconds: Sequence[float]) -> Trace:
        """Return the same step with other seconds for its functions."""
        pairs = zip(self.functions, seconds, strict=True)
        return Trace(self.variables, tuple(replace(f, seconds=s) for f, s in pairs))
