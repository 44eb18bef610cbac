"""Forecast of a step's live bytes at every micro-batch size, as lines through its dry runs.

A forecast is data and arithmetic. It has the timelines of a divided and of an undivided step as
functions of the samples, and the bytes in addition: the optimizer's state, copies of buffers, the
first inspection, the update. How it is made is `anybatch.planner.ladder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from anybatch.conv.dispatch import KernelRecorder
from anybatch.errors import AnybatchError
from anybatch.execution.full_batch_rng.kernels import largest_draw
from anybatch.execution.signature import MICRO_BATCHES, Case, Signature, first_rows
from anybatch.memory.ledger import BentTimeline, Line, Timeline
from anybatch.memory.lockstep_budget import Lane
from anybatch.planner import rehearsal
from anybatch.planner.rehearsal import Inspection

ASIDE, DRAW, GATHERED = "gradients set aside", "a draw of the full batch", "gathered of all samples"
"""Owners: gradients that were there before a step, into which the update takes the sums; bytes of a
draw that every micro-batch makes; rows that a model gathers, and that none may offload."""

SHARDS, OUTPUTS, WORKSPACE = "shards", "outputs", "workspace"
"""Owners: remains of gathered parameters, and gradients of this rank; outputs of all samples, where
the engine stores them; what convolutions allocate beside their operands and results."""

OF_UPDATE = ("optimizer", ASIDE, SHARDS, WORKSPACE)
"""Owners that a dry run of an update has itself, or has not at all."""

STATES = ("parameters", "buffers", "gradients")
"""Owners of a rehearsal's bytes that are there once, however many micro-batches wait."""

INSPECTION, DIVIDED, UNDIVIDED = "first inspection", "the first micro-batches", "the full batch"
"""Phases of a step, as `Forecast.phases` names them: that of the model, and then one of two."""

SHARE = 24
"""Masks hold this part of an inspection's bytes or less: a byte a row of a tensor, or few."""

MASKS = 12
"""Blocks of masks in addition, where a block is larger than its mask.

With 6 and with 8 of them two losses of `tests/devices/test_budget.py` held a block more."""

OUTPUTS_AGAIN = 12
"""Samples whose outputs an inspection holds at most, beside a forward that it runs again: four and
two, and as many of a comparison."""

LOSS = 8
"""Bytes of the loss that a step returns, which is still there during the update."""


@dataclass(frozen=True)
class Forecast:
    """Live bytes of a step as a function of the samples in its micro-batches.

    Attributes:
        how: the rung of the ladder, in words.
        looked: the first inspection of the model, at units of two samples.
        divided: the first micro-batches.
        undivided: a step that is not divided.
        update: ``optimizer.step()``; None where there is none, or it cannot be rehearsed.
        constant: owner -> bytes that are there during all of a step.
        copied: bytes of the buffers, which a step copies.
        gradients: bytes of a set of gradients.
        inspection: findings of the first inspection.
        case: the fakes, where there are some: a size can be rehearsed exactly.
        entries: bytes that a sample adds to sparse gradients, whose sums grow.
        draws: samples -> bytes of each draw of a forward, where it is made for the full batch.
        global_samples: of all ranks, for which such a draw is made; 0 (default) is one process.
        pieces: bytes of the small gradients, which ranks sum in pieces.
        indivisible: the model takes no fewer samples than the batch has.
        full_batch: only a step of the full batch was forecast.
        shown: bytes of the outputs of a sample, where the engine stores those of all; else 0.
        grain: bytes to whose multiples the device rounds an allocation up; 1 (default) is none.
        accumulated: the divided step with an accumulator, where it was rehearsed; else None.
        confirmed: sizes that were rehearsed just as they are, and the timelines of these.
        micro_batches: of a rehearsal of a divided step, at least.
        few: undivided steps of two real rows, of three, ..., where the lines are those of such, and
            fakes tell whether they hold; else none.
        on_line: sizes that were compared with the lines, and whether they are on these.
        recorded: sizes whose convolutions were recorded, and these.
        lanes: samples of a lane, and of the batch where a loss couples them, else 0 -> the dry run
            of that lane; None if it is not usable.
    """

    how: str
    looked: Line
    divided: Line
    undivided: Line
    update: Timeline | None
    constant: Mapping[str, int]
    copied: int
    gradients: int
    inspection: Inspection
    case: Case | None = field(repr=False)
    entries: int = 0
    draws: tuple[tuple[int, tuple[int, ...]], ...] = ()
    global_samples: int = 0
    pieces: int = 0
    indivisible: bool = False
    full_batch: bool = False
    shown: int = 0
    grain: int = 1
    accumulated: Line | None = None
    confirmed: dict[tuple[int, int, int, bool], Timeline] = field(
        default_factory=dict, repr=False, compare=False
    )
    micro_batches: int = MICRO_BATCHES
    few: tuple[Timeline, ...] = field(default=(), repr=False, compare=False)
    on_line: dict[int, bool] = field(default_factory=dict, repr=False, compare=False)
    recorded: dict[int, KernelRecorder] = field(default_factory=dict, repr=False, compare=False)
    lanes: dict[tuple[int, int], Lane | None] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def on_fakes(self) -> bool:
        """Whether the model runs on fakes."""
        return self.full_batch or self.case is not None

    def owners(self, n: int, size: int) -> dict[str, int]:
        """Return owner -> bytes at the peak of a step of `size` samples in micro-batches of `n`."""
        return self._at_peak(self._line(n, size), n, size)

    def peak(self, n: int, size: int) -> int:
        """Return the bytes of that peak."""
        return total(self.owners(n, size))

    def least(self, size: int, most: int) -> tuple[int, int]:
        """Return the size of micro-batches, up to `most`, that needs the fewest bytes, and these.

        One sample, or all: a small batch undivided has no sums of gradients in addition.
        """
        sizes = (1, size) if most >= size else (1,)
        found = {n: max(self.confirm(n, size), self.peak(n, size)) for n in sizes}
        n = min(found, key=lambda n: (found[n], n))
        return n, found[n]

    def largest(self, budget: int, size: int) -> int:
        """Return the most samples in a micro-batch with which a step fits in `budget` bytes.

        It is `size` where the batch need not be divided, and 0 where nothing fits.
        """
        if self.peak(size, size) <= budget:
            return size
        n = min(self.divided.largest(budget - total(self.held(size, divided=True))), size - 1)
        while n > 0 and self.peak(n, size) > budget:  # the inspection, or the update
            n -= 1 if n <= 8 else n // 8
        if n > 0:
            return n
        # A line is a bound: a loss is compared on two rows, where there are two
        # (test_what_fits_as_it_is_is_not_refused_for_a_line_above_it).
        return next((few for few in (size, 1) if self._fits(few, size, budget)), 0)

    def _fits(self, n: int, size: int, budget: int) -> bool:
        """Say whether a step fits as it is rehearsed at `n`; not where the model takes no such."""
        try:
            return self.confirm(n, size) <= budget
        except (AnybatchError, torch.OutOfMemoryError):
            raise
        except (ValueError, IndexError, RuntimeError, torch.jit.Error):  # as few rows make it raise
            return False

    def accumulator_peak(self, n: int, size: int, *, confirmed: bool) -> int:
        """Return the bytes of a peak with an accumulator, rehearsed if `confirmed`, or bounded."""
        if self.accumulated is not None and not (confirmed and self.few):
            return total(self.accumulator_owners(n, size))
        if self.case is None or not confirmed:
            # A sparse sum is a new tensor beside the old one and the micro-batch's
            # (test_sparse_gradients_are_in_the_forecast).
            return self.peak(n, size) + self.gradients + self.entries * size
        return self.confirm(n, size, accumulator=True)

    def accumulator_owners(self, n: int, size: int) -> dict[str, int]:
        """Return owner -> bytes at that peak, by a line; nothing where there is none."""
        return {} if self.accumulated is None else self._at_peak(self.accumulated.at(n), n, size)

    def confirm(self, n: int, size: int, *, accumulator: bool = False) -> int:
        """Return the bytes of the peak at just this size: rehearsed, where that costs nothing."""
        if self.case is None:
            return self.peak(n, size)
        return total(self._at_peak(self.rehearsed(n, size, accumulator=accumulator), n, size))

    def rehearsed(self, n: int, size: int, *, accumulator: bool) -> Timeline:
        """Return one more rehearsal of a step, which is made once."""
        key = n, size, self.global_samples, accumulator
        if key in self.confirmed:
            return self.confirmed[key]
        assert self.case is not None
        line = self.accumulated if accumulator else self.divided
        if not self.divides(n, size):
            found, _ = rehearsal.full_batch(self.case, size, self.inspection)
        elif line is not None and self.few and self._fakes_agree(n):
            found = line.at(n)
        else:
            case = replace(first_rows(self.case, size), global_samples=self.global_samples)
            found = rehearsal.divided(case, n, self.inspection, accumulator=accumulator)
        self.confirmed[key] = found
        return found

    def _fakes_agree(self, n: int) -> bool:
        """Say whether fakes of `n` samples, undivided, have the bytes of their line at every event.

        Two micro-batches of them would take twice as long. What agrees at one size is believed for
        smaller ones, between it and those of the line.
        """
        assert self.case is not None
        if self.global_samples:
            return False
        if any(agrees and m >= n for m, agrees in self.on_line.items()):
            return True
        if n not in self.on_line:
            # The bytes of a loss of all pairs are below the line, and on the parabola.
            line = rehearsal.extrapolated(self.few, 2, n)
            self.on_line[n] = rehearsal.holds_all_of(line, rehearsal.full_batch(self.case, n)[0])
        return self.on_line[n]

    def convolutions(self, n: int) -> KernelRecorder | None:
        """Return the convolutions of a micro-batch of `n`; None without a dry run on fakes.

        Those of a step are those of all its micro-batches: of `n`, and of the last one.
        """
        if self.case is None:
            return None
        if n not in self.recorded:
            self.recorded[n] = rehearsal.kernels(self.case, n, self.inspection)
        return self.recorded[n]

    def with_more(self, owner: str, count: int) -> Forecast:
        """Return the forecast with `count` more bytes of one owner that are there all the time."""
        return replace(self, constant=merged(self.constant, {owner: count}))

    def completed(self, signature: Signature, workspace: int) -> Forecast:
        """Return the forecast plus samples of all ranks, gradients of before, and workspace."""
        found = replace(self, global_samples=signature.global_samples)
        found = found.with_more(WORKSPACE, workspace) if workspace else found
        return found.with_more(ASIDE, signature.before) if signature.before else found

    def steeper(self, each: int) -> Forecast:
        """Return the forecast with `each` bytes more for each sample of a micro-batch."""
        divided, undivided = steeper(self.divided, each), steeper(self.undivided, each)
        sums = self.accumulated and steeper(self.accumulated, each)
        return replace(self, divided=divided, undivided=undivided, accumulated=sums, confirmed={})

    def phases(self, n: int, size: int, *, accumulator: bool = False) -> dict[str, Timeline]:
        """Return a step of `size` samples in micro-batches of `n`: name -> timeline of its phases.

        Of a divided step they are the first micro-batches. The peak of all is `peak`, where
        `accumulator` is False: else gradients are summed in one, where that was rehearsed.
        """
        divided, others = self.divides(n, size), self._other_phases(n, size)
        sums = self.accumulated if accumulator and divided else None
        step = self._line(n, size) if sums is None else sums.at(n)
        if self.global_samples:
            step = step.ended("sum over ranks", {"gradients": self.pieces})
        step = step.plus(self.throughout(n, size))
        found = {name: others.pop(name) for name in [INSPECTION] if name in others}
        return {**found, DIVIDED if divided else UNDIVIDED: step, **others}

    def divides(self, n: int, size: int) -> bool:
        """Say whether a step goes the way of several micro-batches; over ranks it always does."""
        return n < size or self.global_samples > 0

    def summed(self, line: Timeline) -> dict[str, int]:
        """Return owner -> bytes at the peak of a step, up to the reduce of gradients over ranks."""
        held = line.at_peak()
        if not self.global_samples:
            return held
        ended = merged(line.final(), {"gradients": self.pieces})
        return max(held, ended, key=total)

    def _at_peak(self, line: Timeline, n: int, size: int) -> dict[str, int]:
        """Return owner -> bytes at the peak of a step with this line, or before or after it."""
        step = merged(self.summed(line), self.throughout(n, size))
        return max(step, self.other_peak(n, size), key=total)

    def _line(self, n: int, size: int) -> Timeline:
        """Return a step of `size` samples in micro-batches of `n`, or the first of them."""
        found = self.confirmed.get((n, size, self.global_samples, False))
        if found is not None:
            return found
        return self.divided.at(n) if self.divides(n, size) else self.undivided.at(size)

    def of_samples(self, size: int) -> int:
        """Return the most bytes that `size` samples hold at once: no states, and no gradients."""
        return own_bytes(self._line(size, size)) + self.constant.get("activations", 0)

    def throughout(self, n: int, size: int) -> dict[str, int]:
        """Return owner -> bytes that are live throughout a step in micro-batches of `n`.

        Of sparse sums these are what they gain after a dry run, for the old and the new sum.
        """
        held, after = self.held(size, divided=self.divides(n, size)), size - self.micro_batches * n
        grown = 2 * self._rounded(self.entries * max(0, after))
        return merged(held, {"gradients": grown}) if grown else held

    def other_peak(self, n: int, size: int) -> dict[str, int]:
        """Return owner -> bytes at the peak of the first inspection, if any, or the update."""
        others = self._other_phases(n, size).values()
        return max(({}, *(one.at_peak() for one in others)), key=total)

    def _other_phases(self, n: int, size: int) -> dict[str, Timeline]:
        """Return the first inspection, if any, and the update, with all other live bytes."""
        found = dict[str, Timeline]()
        if self.divides(n, size):
            # In units of two rows, at most four: `anybatch.execution.few_rows.two_sizes`.
            looked = self.looked.at(min(n, 2))
            masks = {"activations": looked.peak // SHARE + MASKS * self.grain}
            found[INSPECTION] = looked.plus(merged(self.held(size, divided=True), masks))
        if self.update is not None:
            outside = {k: b for k, b in self.constant.items() if k not in OF_UPDATE}
            outputs = self.held(size, divided=False).get(OUTPUTS, 0)
            more = {"activations": self._rounded(LOSS)} | ({OUTPUTS: outputs} if outputs else {})
            found["update"] = self.update.plus(merged(outside, more))
        return found

    def inspection_bytes(self, n: int, size: int) -> int:
        """Return those of an inspection with all its forwards; 0 where none was forecast.

        After the two that are rehearsed it may follow all rows again, with the outputs of both.
        """
        found = {} if self.full_batch else self._other_phases(n, size)
        if INSPECTION not in found:
            return 0
        outputs = OUTPUTS_AGAIN * self.inspection.shows
        return total(found[INSPECTION].at_peak()) + self._rounded(outputs)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.grain) * self.grain

    def held(self, size: int, *, divided: bool) -> dict[str, int]:
        """Return owner -> bytes that are live throughout a step of `size` samples."""
        copies, samples = self.copied * (2 if divided else 1), max(size, self.global_samples)
        counts, found = [n for n, _ in self.draws], [each for _, each in self.draws]
        draw = largest_draw(found, counts, samples) if any(found) and divided else 0
        gathered = self.inspection.gathers * samples if divided else 0
        tensors = max(1, len(self.inspection.layout))
        outputs = self.shown * size + tensors * (self.grain - 1) if self.shown else 0
        extra = {"buffers": copies, DRAW: self._rounded(draw), GATHERED: self._rounded(gathered)}
        extra[OUTPUTS] = outputs
        return merged(self.constant, {owner: count for owner, count in extra.items() if count})


def steeper(line: Line, each: int) -> Line:
    """Return a line with `each` bytes a sample more at every event, of activations if any."""
    if isinstance(line, BentTimeline):
        return BentTimeline(steeper(line.few, each), steeper(line.many, each), line.bend)
    slope, owners = line.slope.copy(), line.owners
    slope[:, owners.index("activations") if "activations" in owners else -1] += each
    return replace(line, slope=slope, spans=None)


def own_bytes(undivided: Timeline) -> int:
    """Return the most bytes that the samples of an undivided step hold at once."""
    own = [owner not in STATES for owner in undivided.owners]
    return int(undivided.live[:, own].sum(1).max(initial=0))


def total(owners: Mapping[str, int]) -> int:
    """Return the bytes of all owners."""
    return sum(owners.values())


def merged(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return owner -> bytes of both together."""
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
