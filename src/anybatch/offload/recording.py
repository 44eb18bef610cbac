"""Recording, as data, of the saved tensors of a step in a user's own loop.

A step is cut where autograd saves a tensor or asks for one; between cuts its kernels run unseen.

    cuts       pack 0    pack 1    pack 0 ...... unpack 1    unpack 0
    intervals 0 │    1    │    2    │   3  ...       │     ...    │
    storage 0   ══════════════════════╸                           ═════   used: there in any case
                                       ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─         may be away, or not

A storage that forward still uses cannot be offloaded: a hook has only autograd's reference to it.
The recording is made while everything is offloaded as soon as possible, so bytes that lived then
must live: they are the rest of each interval, in addition to the storages used in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anybatch.offload.trace import Function, Trace, Variable

STAYED = -1
"""The number of a storage that is not offloaded."""


class Cut(NamedTuple):
    """A moment in which autograd saves a tensor, or asks for it.

    Attributes:
        saves: it saves it.
        number: of its storage, in the order in which they are saved first; `STAYED` for no number.
        looks: shape and dtype of the saved tensor.
        size: bytes of its storage.
    """

    saves: bool
    number: int
    looks: tuple[Any, ...] = ()
    size: int = 0


@dataclass(frozen=True)
class Remake:
    """Recomputation of a storage at its first request, verified bit for bit.

    Attributes:
        sources: the storages that it is made from.
        seconds: how long it took.
        work: the most bytes meanwhile, in addition to its own and theirs.
    """

    sources: tuple[int, ...]
    seconds: float
    work: int = 0


@dataclass(frozen=True)
class Recording:
    """One step as it was recorded with every storage offloaded that may be.

    Attributes:
        cuts: in order; there is one interval more.
        sizes: storage -> bytes.
        used: interval -> the storages that are there in it.
        rest: interval -> the most bytes of all else that the step has made.
        seconds: interval -> how long it took.
        loose: storages that outlive their last use, so that a plan would not know their end.
        outside: bytes that were there before the step, and are used in it.
        peak: the most bytes that were there, these among them.
        standing: cut -> bytes of all else that the step had made by then.
        remakes: storages that are cheap to make again.
    """

    cuts: tuple[Cut, ...]
    sizes: tuple[int, ...]
    used: tuple[frozenset[int], ...]
    rest: tuple[int, ...]
    seconds: tuple[float, ...]
    loose: frozenset[int]
    outside: int
    peak: int
    standing: tuple[int, ...] = ()
    remakes: Mapping[int, Remake] = field(default_factory=dict)

    @property
    def planned(self) -> tuple[int, ...]:
        """Return the storages that a plan may keep or move."""
        return tuple(number for number in range(len(self.sizes)) if number not in self.loose)

    def trace(self) -> Trace:
        """Return the step as planners take it: an interval is a function.

        Its variables are the storages, by their numbers, then one for the rest of each interval.
        """
        variables = [Variable(f"storage {k}", size) for k, size in enumerate(self.sizes)]
        functions, made = [], set[int]()
        for i, (used, rest) in enumerate(zip(self.used, self.rest, strict=True)):
            rest += sum(self.sizes[k] for k in used & self.loose)  # noqa: PLW2901
            here = sorted(used - self.loose)
            new = [k for k in here if k not in made]
            made.update(new)
            reads = tuple(k for k in here if k not in new)
            makes = (*new, len(variables))
            variables.append(Variable(f"rest of {i}", rest, stays=True))
            functions.append(Function(self._name(i), reads, makes, seconds=self.seconds[i]))
        return Trace(tuple(variables), tuple(functions))

    def _name(self, i: int) -> str:
        if i == 0:
            return "begin"
        cut = self.cuts[i - 1]
        return f"{'pack' if cut.saves else 'unpack'} {cut.number}"
