"""The batch over all ranks: loss and gradient of all samples, wherever they are.

Every rank runs its own samples, in micro-batches of its own number; what is shared is little:

    begin       sizes; whether samples meet; a rank without samples learns what it misses
    totals      denominators of the loss, counted over all samples
    meetings    moments of BatchNorm forward, two sums backward: from the last lane of each rank
    gradients   one sum over all ranks, in float32 or better, with no division by their number; of
                a streamed step, from the second on, while its last backward still runs
    end         nobody keeps what not all can keep

Source: AGBN, Algorithms 2 and 5 (means weighted by m_i); design of this project, section 5.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from anybatch.core.accelerator import home, wide
from anybatch.core.norm.moments import merged_in_order
from anybatch.core.rng import Dice
from anybatch.distributed import gradients
from anybatch.distributed.alike import Alike
from anybatch.distributed.beginning import Beginning, Habit, Here, UnexpectedError
from anybatch.distributed.denominators import counted, packed
from anybatch.distributed.dice import drawn_apart
from anybatch.distributed.everyone import Amended, Layout, Moved, Rows, Take
from anybatch.distributed.gradients import AddedTwiceError, Sums
from anybatch.distributed.pieces import Pieces
from anybatch.distributed.rows import joined_rows, rows_of_all
from anybatch.distributed.unison import END, Scripts, Unison
from anybatch.errors import RankError
from anybatch.loss.declared import Total

P = ParamSpec("P")
R = TypeVar("R")


def meets(method: Callable[Concatenate[Ranks, P], R]) -> Callable[Concatenate[Ranks, P], R]:
    """Wrap a method so that it ends before Ctrl-C does: other ranks would wait for this one.

    A beginning that was put off comes before it.
    """

    @wraps(method)
    def whole(self: Ranks, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._unison.met():
            if not self._begun:
                self._begin()
            return method(self, *args, **kwargs)

    return whole


class Ranks:
    """Ranks of one step, joined by collectives.

    Args:
        unison: the collectives of the step.
        here: what this rank brings.
        alike: what must be the same on all.
        scripts: the collectives of earlier steps of this kind, where there were some.
        dense: places of the parameters that had a dense gradient in it, on some rank; None where
            they cannot be sent before the end of backward. Default empty.
        habit: what all have brought to their last steps; None (default) lets nothing be expected.

    Attributes:
        size: N_B over all ranks.
        begin: the place of this rank's first sample among them.
        micro_batch: the smallest of any rank that has samples.
        lanes: samples meet in BatchNorm on some rank.
        coupled: some rank knows that the loss needs all outputs.
        settled: no rank has to plan for more samples than it has, so the step can begin; else all
            ranks come together once more.
        dense: as given, and after `gradients` as this step has found it.

    Raises:
        BatchError: no rank has a sample.
        RankError: some call `backward`, others `evaluate`; or they are not alike.
    """

    several = True

    def __init__(
        self,
        unison: Unison,
        here: Here,
        alike: Alike,
        scripts: Scripts | None = None,
        dense: tuple[int, ...] | None = (),
        habit: Habit | None = None,
    ) -> None:
        self._unison, self._here, self.dense = unison, here, dense
        self._facts = [*map(float, here), *alike]
        self._scripts, self._habit = scripts or {}, habit or Habit()
        self._offered: Pieces | None = None
        self._counted: list[list[Total] | None] = []
        self._shared = self._ending = self._begun = False
        self._sums: Sums | None = None
        self._loss: tuple[Tensor, Tensor] | None = None
        self._moves: Moved | None = None
        self._expected = self._habit.expected(self._facts, unison.group.rank)
        if self._expected is None:
            with unison.met():
                self._begin()
        else:
            self._take(self._expected)

    def _begin(self, told: Tensor | None = None) -> list[Tensor] | None:
        """Exchange the facts of all ranks; return the numbers sent with them, if all sent any.

        Raises:
            UnexpectedError: it is something else than was expected.
        """
        rows, said = self._unison.begin(self._facts, self._scripts, told)
        self._begun = True
        self._habit.note(rows)
        if self._expected is None:
            self._take(rows)
        elif rows != self._expected:
            raise UnexpectedError
        if not self.settled:
            self._unison.begin_again()
        return said

    def _take(self, rows: list[list[float]]) -> None:
        found = Beginning(rows, self._unison.group.rank)
        self.size, self.begin = found.size, found.begin
        self.micro_batch, self.lanes, self.coupled = found.micro_batch, found.lanes, found.coupled
        self.settled, self._sizes, self._first = found.settled, found.sizes, found.first

    @property
    def script(self) -> Scripts:
        """The collectives of the step."""
        return {self._unison.kind: tuple(self._unison.script)}

    @property
    def sending(self) -> bool:
        """Whether gradients are on their way."""
        return self._unison.early is not None and self._unison.early.begun

    def offer(self, parameters: Sequence[Tensor]) -> None:
        """Offer to send gradients early that were dense in the last step of this signature."""
        places = self.dense or ()
        if gradients.OVERLAP and not self._counted and max(places, default=-1) < len(parameters):
            self._offered = Pieces(self._unison.group, parameters, places) if places else None

    def during(self, take: Take) -> AbstractContextManager[None]:
        """Return the context of the last backward, which sends early if all ranks agreed."""
        early = self._unison.early
        return nullcontext() if early is None else early.during(take)

    def totals(self, totals: list[Total] | None) -> list[Total] | None:
        """Return the denominators of the full batch; a rank without samples passes an empty list.

        A step that begins again on this rank alone gets what was counted before.
        """
        if not self._counted:
            with self._unison.met():
                self._counted.append(self._count(totals))
        return self._counted[0]

    def _count(self, totals: list[Total] | None) -> list[Total] | None:
        offer = 0 if self._offered is None else self._offered.digest
        part = packed(totals, has_rows=self._here.size > 0, offer=offer)
        told = None if self._begun else self._begin(part)
        rows = [row.tolist() for row in told or self._unison.gather("the loss", part)]
        found = counted(rows, totals or [])
        known = found is not None and all(one.denominator is not None for one in found)
        if known and self._offered and all(row[-1] == offer for row in rows):
            self._unison.send_early(self._offered)
        return found

    @meets
    def sum_of(self, what: str, value: float | Tensor) -> float | Tensor:
        """Return the sum over all ranks: a tensor on the device of `value`, or a number."""
        self._shared = True
        number = (
            wide(value) if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        )
        total = self._unison.sum(what, number.reshape(1))[0]
        if isinstance(value, Tensor):
            return total.to(value.device, value.dtype if value.dtype != torch.long else None)
        return float(total)

    @meets
    def reduce(self, key: Any, part: Any, add: Callable[[Any, Any], Any]) -> Any:
        """Return the sum of tensors, or of moments, over all ranks."""
        self._shared = True
        if isinstance(part, Tensor):
            real = torch.view_as_real(part) if part.is_complex() else part
            total = self._unison.sum(str(key), real).reshape(real.shape)
            total = total.to(real.device, real.dtype)
            return torch.view_as_complex(total) if part.is_complex() else total
        rows = self._unison.gather(str(key), part.packed())
        return merged_in_order([row.to(home(part.mean.device)) for row in rows], add)

    @meets
    def gather(self, key: Any, rows: Tensor) -> tuple[Tensor, int]:
        """Return the rows of all ranks, and where these begin among them."""
        self._shared = True
        self._unison.call(str(key))
        with self._unison.raw():
            sizes = self._unison.group.objects(len(rows))
            whole = joined_rows(self._unison.group, rows, sizes)
        return whole, sum(sizes[: self._unison.group.rank])

    @meets
    def rows(self, outputs: Any, targets: Any, layout: Layout, size: int) -> Rows:
        """Return outputs and targets of all ranks, in their order; see `Rows`."""
        self._shared = True
        found, aims = rows_of_all(self._unison, outputs, targets, layout, size)
        leads = self._unison.group.rank == self._first
        return Rows(found, aims, self.size, self.begin, leads=leads, here=size)

    def loss(self, here: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor that `end` fills with the loss of all samples."""
        self._loss = here, torch.empty_like(here, dtype=dtype)
        return self._loss[1]

    @meets
    def gradients(self, sums: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor | None]:
        """Return the sums over all ranks; None where no rank has one.

        Where pieces were agreed on, who had what is told at the end, which may `amend` the sums.
        """
        self._shared = self._ending = True
        early = self._unison.early
        found = Sums(self._unison, sums, early)
        if early is not None:
            self._sums = found
            totals = found.early()
            self._unison.early = None
            return totals
        kinds = torch.tensor(found.kinds, dtype=torch.float64)
        found.heard(self._unison.gather(found.place, kinds))
        totals = [None] * len(sums)
        for at, total in found.late():
            totals[at] = total
        self._note(found)
        return totals

    def _note(self, sums: Sums) -> None:
        if self.dense is not None:
            self.dense = sums.dense

    @meets
    def agree(self, devices: Sequence[torch.device]) -> None:
        """Check that all ranks have one RNG state, and copy it to those without samples.

        Raises:
            NotExactError: a rank has drawn otherwise than another; all of them say so.
        """
        self._shared = True
        own = Dice.on(devices)
        check = torch.tensor([own.checksum()], dtype=torch.float64)
        found = [float(row) for row in self._unison.gather("where the dice are", check)]
        first = found[self._first]
        other = [r for r, size in enumerate(self._sizes) if size and found[r] != first]
        if other:
            raise drawn_apart(self._first, other)
        if not all(self._sizes):
            dice: Dice = self._unison.told(own, self._first)
            if not self._here.size:
                dice.put_on(devices)

    @meets
    def again(self, *, coupled: bool, others: bool = False) -> None:
        """Tell the others that this rank runs the step again, where that concerns them.

        Args:
            coupled: the loss needs all outputs at once.
            others: it concerns them. Default False: where they have heard of this run.

        Raises:
            RanksAgainError: they run it again, too.
            RankError: they are about to end it.
        """
        if self._ending:
            raise RankError(
                "memory must last until a step has ended on all ranks, and it ran out on this one "
                "after the gradients had been summed: give less memory= or a smaller micro_batch"
            )
        if self._shared or self.sending or coupled or others:
            self._unison.fail("coupled" if coupled else "smaller")

    def anew(self) -> None:
        """Discard the counted denominators: all ranks run the step again."""
        self._counted, self._offered, self._sums, self._loss = [], None, None, None
        self._shared = self._ending = False

    def moves(self, buffers: Moved) -> None:
        """Copy buffers that forward moved to ranks without samples, when the step ends."""
        self._moves = buffers

    @meets
    def end(self) -> Amended:
        """Wait until all ranks have ended the step; return the amended sums.

        Raises:
            RanksAgainError: the step has to be run again.
        """
        amended = self._end()
        if self._moves is not None and not all(self._sizes):
            told = self._unison.told(self._moves.told(), self._first)
            if not self._here.size:
                self._moves.hear(told)
        return amended

    def _end(self) -> Amended:
        sums, loss = self._sums, self._loss
        numbers = [] if sums is None else sums.kinds
        numbers = numbers if loss is None else [*numbers, float(loss[0])]
        if not numbers:
            self._unison.end()
            return []
        place = END if sums is None else sums.place
        rows = self._unison.gather(place, torch.tensor(numbers, dtype=torch.float64))
        amended = [] if sums is None else self._amended(sums, rows)
        if loss is not None:
            loss[1].fill_(sum(float(row[-1]) for row in rows))
        self._unison.over()
        return amended

    def _amended(self, sums: Sums, rows: list[Tensor]) -> Amended:
        try:
            missing = sums.heard([row[: len(sums.kinds)] for row in rows])
        except AddedTwiceError:
            self.dense = None
            self._unison.learn_anew()
            raise
        self._note(sums)
        amended = [(sums.parameters[at], total) for at, total in sums.late()]
        if missing:
            self._unison.off_script()
            self._unison.end()
        return amended
