"""Collectives that all ranks run in the same order, or that end with the reason on all ranks.

A rank that fails, or runs the step again, cannot simply stop: the others would wait for it. So it
takes part in the next collective with a failure flag, and then all ranks exchange their states.

    rank 0:  begin  BN1  BN2  ...                      reads "rank 1: out of memory", begins again
    rank 1:  begin  BN1  fails ──> flag in BN2         reports it, begins again

To raise the flag it must know the shape of that collective. In the first step of a signature a
header of fixed shape precedes each; the sequence is saved, and later steps need none. For the same
reason Ctrl-C waits until a collective that has begun is over.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from anybatch.core.accelerator import wide
from anybatch.core.retry import Retry
from anybatch.core.transaction import uninterrupted
from anybatch.distributed.buckets import Pieces
from anybatch.distributed.process_group import FEW, Group
from anybatch.errors import LockstepError, RankError

Status = Literal["fine", "anew", "failed"]
T = TypeVar("T")

KEYS = 2**20
"""Keys are distinguished by a number below this, so that sums of their squares are exact."""


class Collective(NamedTuple):
    """A collective: how, and how many numbers."""

    how: Literal["gather", "sum", "header"]
    numbers: int


Scripts = dict[bool, tuple[Collective, ...]]
"""Whether pieces of gradients are sent early -> the collectives of a step after its beginning."""

HEADER, FACTS = Collective("header", 16), Collective("gather", 16)
"""Collectives that may meet another one have one shape: the key shows a difference."""

SUMS = "the sum of"
"""Prefix of the name of a sum of gradients, followed by their number."""

END = "the end of the step"

SLOTS = 3
"""Flag, key and key squared stand before the numbers of a collective."""


class Coordinator:
    """The collectives of one step.

    Args:
        group: the ranks.
        facts: gathers before `begin`. Default 0.
        called: `call` comes before all else. Default False.

    Attributes:
        script: the collectives of this step so far, without the first.
        early: pieces of gradients that all ranks send before the next collective; None if none are.
        sends_early: whether this step sends pieces early, as far as it has come.
    """

    def __init__(self, group: Group, *, facts: int = 0, called: bool = False) -> None:
        self.group = group
        self.script: list[Collective] = []
        self.early: Pieces | None = None
        first = (HEADER,) if called else ()
        self._expected: tuple[Collective, ...] | None = first + (FACTS,) * (facts + 1)
        self._scripts: Scripts = {}
        self.sends_early = False
        self._over = False
        self._raw = False
        group.begin()

    def fact(self, key: str) -> None:
        """Check that all ranks reach this barrier; only before `begin`."""
        self.gather(key, _filled([]))

    def begin_again(self) -> None:
        """Record that all ranks run `begin` once more."""
        self.script, self._expected = [], (FACTS,)

    def broadcast_object(self, one: Any, source: int) -> Any:
        """Return the picklable object of the rank `source`; the others' does not matter.

        All ranks must reach this call.
        """
        with self.raw():
            return self.group.broadcast_object(one, source)

    def begin(self, facts: list[float], scripts: Scripts) -> list[list[float]]:
        """Return the facts of all ranks; go by the script from here on, if all have the same.

        Args:
            facts: fewer numbers than `FACTS` has.
            scripts: the collectives of earlier steps of this signature; missing ones are learned.
        """
        checksum = _number(repr(sorted(scripts.items())))
        rows = self.gather("the beginning of a step", _filled([checksum, *facts]))
        every = [row[: 1 + len(facts)].tolist() for row in rows]
        self._scripts = scripts if all(one[0] == checksum for one in every) else {}
        self.script = []
        self._goes_on()
        return [one[1:] for one in every]

    def send_early(self, pieces: Pieces) -> None:
        """Take in that all ranks send these pieces, and go by the script of a step that does."""
        self.early, self.sends_early = pieces, True
        self._goes_on()

    def _goes_on(self) -> None:
        self._expected = self._scripts.get(self.sends_early)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Defer Ctrl-C until the collectives of the body are over; a second one interrupts."""
        with uninterrupted(once=True):
            try:
                yield
            except KeyboardInterrupt:  # where the others are is not known
                self.group.abandon()
                raise

    @contextmanager
    def raw(self) -> Iterator[None]:
        """Run collectives on unchanged tensors, which all ranks are sure to reach."""
        self._raw = True
        yield
        self._raw = False

    def gather(self, key: str, part: Tensor) -> list[Tensor]:
        """Return the parts of all ranks, [n] float64 each, in order.

        Raises:
            LockstepError: another rank is somewhere else.
            RankError: another rank has failed.
            Retry: another rank runs the step again.
        """
        self._announce(key, Collective("gather", part.numel()))
        rows = self.group.gather(_slotted(part, key))
        flags = torch.stack([row[:SLOTS] for row in rows]).sum(0)
        self._check(flags, key)
        return [row[SLOTS:] for row in rows]

    def sum(self, key: str, part: Tensor) -> Tensor:
        """Return the sum of the parts of all ranks, [n] float64."""
        if part.numel() * self.group.size <= FEW:
            return torch.stack(self.gather(key, part)).sum(0)
        self._announce(key, Collective("sum", part.numel()))
        total = self.group.sum(_slotted(part, key))
        self._check(total[:SLOTS], key)
        return total[SLOTS:]

    def call(self, key: str) -> None:
        """Check that all ranks reach this barrier, and can run collectives that cannot fail."""
        self._expect(HEADER)
        self._header(key, 0)
        self.script.append(HEADER)

    def end(self) -> None:
        """Check that all ranks reach the end of the step; later failures concern one rank only."""
        self.call(END)
        self.over()

    def over(self) -> None:
        """Record that all ranks have reached the end of the step."""
        self._over = True

    def off_script(self) -> None:
        """Stop expecting the earlier step's collectives: a header precedes each from here on."""
        self._expected = None

    def fail(self, status: Status, message: str = "") -> None:
        """Raise the flag in the next collective, unless all know already that the step is over.

        Sums that were agreed on before it are sent as zeros.

        Raises:
            RankError: another rank has failed too, and this one has not.
            Retry: another rank runs the step again, and this one has neither failed nor does so.
        """
        if self._over or self.group.broken:
            return
        if self._raw:
            self.group.abandon()
            return
        self.give_up_early()
        expected, at = self._expected, len(self.script)
        coming = expected[at] if expected is not None and at < len(expected) else HEADER
        flagged = torch.zeros(SLOTS + coming.numbers, dtype=torch.float64)
        flagged[0] = 1.0
        if coming.how == "sum":
            self.group.sum(flagged)
        else:
            self.group.gather(flagged)
        self._exchange_status(status, message)

    def give_up_early(self) -> None:
        """Send the promised pieces, as zeros where not yet sent, and drop all of them."""
        early, self.early = self.early, None
        if early is not None:
            early.give_up()

    def _announce(self, key: str, coming: Collective) -> None:
        if self._expected is None:
            self._header(f"{key} {coming.how}", coming.numbers)
        else:
            self._expect(coming)
        self.script.append(coming)

    def _expect(self, coming: Collective) -> None:
        """Run the step again where other ranks expect another collective, of an earlier step."""
        expected, at = self._expected, len(self.script)
        if expected is not None and (at >= len(expected) or expected[at] != coming):
            raise Retry("sites")

    def _header(self, key: str, numbers: int) -> None:
        rows = self.group.gather(_slotted(_filled([numbers]), key))
        flags = torch.stack(rows).sum(0)
        self._check(flags[:SLOTS], key)
        if any(float(row[SLOTS]) != numbers for row in rows):
            self._elsewhere(f"{key} of {numbers}")

    def _check(self, flags: Tensor, key: str) -> None:
        flag, keys, squares = (float(value) for value in flags)
        if flag:
            self._exchange_status("fine", "")
        number, size = _number(key), self.group.size
        if keys != size * number or squares != size * number**2:
            self._elsewhere(key)

    def _elsewhere(self, key: str) -> None:
        """Raise an error with the place of each rank: all ranks have found that these differ."""
        self._over = True
        places = self.group.objects(key)
        said = "; ".join(f"rank {rank} is at {place}" for rank, place in enumerate(places))
        if all(place.startswith(SUMS) for place in places):
            raise LockstepError(
                f"every rank must find the same parameters, and {said}: a rank without samples "
                "cannot find those that only the loss holds. Give Engine the optimizer that "
                "trains them (optimizer=)"
            )
        raise LockstepError(
            "every rank must go through the same layers where samples meet, with the same number "
            f"of values, and {said}: the model takes another path for other samples. Use "
            'batchnorm="local", or give every rank the same model, loss, parameters and engine'
        )

    def _exchange_status(self, status: Status, message: str) -> None:
        """Exchange the status of all ranks.

        Raises:
            RankError: a rank has failed, and this one has not.
            Retry: no rank has failed, and another one runs the step again.
        """
        self.give_up_early()
        statuses: list[tuple[Status, str]] = self.group.objects((status, message))
        self._over = True
        if any(one == "failed" for one, _ in statuses):
            if status != "failed":
                raise RankError(_failures(statuses))
        elif status != "anew":
            raise Retry("ranks")


def guarded(coordinator: Coordinator, run: Callable[[], T]) -> T:
    """Run a rank's own part of a step, and notify the other ranks where it fails."""
    try:
        return run()
    except Retry:
        with coordinator.shielded():
            coordinator.fail("anew")
        raise
    except BaseException as error:
        _tell(coordinator, error)
        raise


def _tell(coordinator: Coordinator, error: BaseException) -> None:
    try:
        with coordinator.shielded():
            coordinator.fail("failed", f"{type(error).__name__}: {error}")
    except (RankError, Retry) as other:
        error.add_note(f"and while the other ranks were informed: {other}")


def _failures(statuses: list[tuple[Status, str]]) -> str:
    failed = [(rank, said) for rank, (status, said) in enumerate(statuses) if status == "failed"]
    words = "; ".join(f"rank {rank}: {said}" for rank, said in failed)
    return (
        f"all ranks must make a step, and {len(failed)} of {len(statuses)} failed ({words}): no "
        "rank has made it, and all state is restored"
    )


def _slotted(part: Tensor, key: str) -> Tensor:
    number = _number(key)
    row = wide(part.detach()).reshape(-1)
    return torch.cat([row.new_tensor([0.0, number, number**2]), row])


def _filled(numbers: Sequence[float]) -> Tensor:
    return torch.tensor([*numbers, *[0.0] * (FACTS.numbers - len(numbers))], dtype=torch.float64)


def _number(key: str) -> int:
    return zlib.crc32(key.encode()) % KEYS
