"""Ladder of forecast methods, from dry runs on fake tensors to the peaks of small real steps.

    1  two dry runs on fake tensors: n = 2 and 3    costs no memory, exact at every event
    2  two steps on a few real rows: n = 2 and 3         where a value is read, or 1 is wrong
    3  the peaks of a few small steps, on a line              where events differ from run to run

Rung 1 is checked: one real step at two samples is measured and compared with it (a kernel may keep
a workspace that no fake tensor shows; that of the CPU's LSTM is counted, see
`anybatch.memory.meter`). On a host a kernel on few rows takes a fraction of one on fakes. So where
real rows surely fit, the two dry runs are run on these, and fakes confirm them at the size that was
chosen. Rung 3 is an estimate with a margin, and says so. If it is too low, the step's own retry
after an out-of-memory error corrects it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from anybatch.core import pytree
from anybatch.core.modules import tensors_of
from anybatch.core.norm import BatchStatisticsError
from anybatch.core.oom import out_of_memory
from anybatch.core.optimizers import allocated, rounded, rounding
from anybatch.distributed.buckets import small_bytes
from anybatch.errors import AnybatchError, NotExactError
from anybatch.execution.signature import MICRO_BATCHES, Case, as_fakes, bytes_of, few
from anybatch.lockstep.batchnorm import values_of_a_part
from anybatch.memory.ledger import AffineTimeline, BentTimeline, Line, NotAffineError, Timeline
from anybatch.memory.meter import STEP
from anybatch.planner import rehearsal
from anybatch.planner.forecast import Forecast, own_bytes
from anybatch.planner.full_batch import (
    PEAKS,
    State,
    Suffices,
    bound_of,
    buffer_bytes,
    gradient_bytes,
    guess,
    of_all,
    of_full_batch,
    of_one_host,
    state_of,
    undivided,
)
from anybatch.planner.rehearsal import Inspection, unharmed

SMALL, SIZES = 2, (2, 3)
"""Samples of the smaller of two rehearsals, and of both; one is often a special case."""

NEAR = 4
"""Samples of the smaller of two more rehearsals on real rows: kernels round what they allocate."""

FARTHER = {16: 1.01, 8: 1.05}
"""Samples of the larger one, if it fits -> factor of the bytes a sample."""

NEAR_MARGIN = 1.2
"""The same, where neither fits: rounded up weighs most."""

ROUNDING = 16384
"""Bytes that a kernel may round an allocation up by, between sizes that were rehearsed: 4 pages."""

SLACK = 4096
"""Bytes of scalars that a real step may hold and a fake one not."""

SCALAR = 8
"""Bytes of a number that a divided step may hold more than one of few rows
(test_a_smaller_size_after_a_failure_is_the_runs)."""

ROWS, COMPUTED, QUICK = 32, 31, 512 << 20
"""Samples of a batch from which rehearsals on few real rows are run where fakes could be: they
compute 31 rows, about a step of it. And bytes that all their rows hold, of a smaller batch for
which they are run as well: a host computes them in about a second, as fakes of 1,000 kernels."""

OF_INSPECTION, OF_STEP = 3, 2
"""Times the bytes of `SMALL` samples for the six of an inspection, which needs no gradients; and
for a micro-batch of three, and the rows of the next."""

OnDevice = Callable[[Forecast], Forecast]
"""Returns a forecast plus workspace and other tensors of its device."""


FAKE = "two dry runs on fake tensors"
ROWS_AND_FAKES = "dry runs on a few real rows and on fake tensors"
REAL = "two steps on a few real rows"


def forecast(
    case: Case,
    optimizer: torch.optim.Optimizer | None,
    *,
    available: int,
    verify: bool,
    others: int = 0,
    on_device: OnDevice = lambda found: found,
    agreed: bool = False,
    suffices: Suffices | None = None,
    fakes: bool = True,
) -> Forecast:
    """Return the forecast of a step, of the highest rung that holds.

    Args:
        case: the real one.
        optimizer: its state is counted as it will be after its first step.
        available: bytes that a rehearsal on real rows may take.
        verify: measure one small real step, and do not believe a rehearsal that it contradicts;
            without, nothing real is run, so there is only the first rung.
        others: bytes of these that other tensors hold. Default 0.
        on_device: adds workspace and other tensors of a device, before a real run. Default: none.
        agreed: fakes have held what real steps hold, at other lengths. Default False.
        suffices: says whether a forecast of the full batch alone is enough. Default None: no.
        fakes: whether the model can be run on fakes. Default True: that is tried.

    Raises:
        Exception: that of the step on real rows; without `verify`, on fakes.
    """
    state, own = state_of(case, optimizer), available - others
    may = suffices if suffices is not None and of_one_host(case) else None
    found: Forecast | None = None
    try:
        if fakes:
            found = _dry_run(case, state, own, verify=verify, suffices=may)
    except (MemoryError, torch.OutOfMemoryError, BatchStatisticsError):
        raise
    except Exception:  # whatever fakes cannot do: the next rung
        if not verify:
            raise
        found = _masks_full(case, state, own, may)
    if found is None and may is not None:
        found = guess(case, state, own, may)
    if found is not None and (found.few or found.full_batch):
        return found
    if found is not None:
        found = on_device(found)
        missing = _missing(found, case, available) if verify and not agreed else 0
        if missing <= SLACK:
            return found.with_more("activations", missing) if missing > 0 else found
    return _on_few(case, state, own, on_device)


def _masks_full(
    case: Case, state: State, available: int, suffices: Suffices | None
) -> Forecast | None:
    """Return the forecast of a loss that selects pairs of samples by masks, as if all were true.

    Few rows have few pairs (test_pairs_that_a_loss_selects_are_foreseen). None where such bytes do
    not fit, as few pairs may be selected, or where forward selects, too: experts of which each got
    all tokens would be far too many.
    """
    full = replace(case, masks_full=True)
    try:
        _, inspection = rehearsal.inspect_model(as_fakes(case), SMALL)
        if not rehearsal.watch_loss(as_fakes(full), inspection).coupled:
            return None
        found = _dry_run(full, state, available, verify=False, suffices=suffices)
        fits = found.full_batch or found.least(case.size, case.size)[1] <= available
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # values are read
        return None
    return found if fits else None


def _on_few(case: Case, state: State, available: int, on_device: OnDevice) -> Forecast:
    """Return the forecast of few real rows, or of a batch of which the model takes no fewer."""
    try:
        return on_device(_on_rows(case, state, available))
    except (AnybatchError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # the step itself raises it, or the model takes batches of its own size alone
        found = undivided(case, state)
        if found is None:
            with values_of_a_part():
                raise
        return on_device(found)


def _dry_run(
    case: Case, state: State, available: int, *, verify: bool, suffices: Suffices | None
) -> Forecast:
    """Return the forecast of the full batch on fakes if that suffices; else of two dry runs.

    These are of a few real rows where such may be run, and else of fakes.
    """
    spare = _spare(case, sum(state[1].values()), available)
    fakes = replace(as_fakes(case), spare=spare)
    inspected, step = None, None
    # Else chunks are not full (test_chunks_of_more_rows_than_a_few_samples_have_are_foreseen).
    sizes = (case.size - 2, case.size - 1) if case.chunked and case.size > SMALL + 1 else SIZES
    on_rows = verify and not (case.chunked or case.tiles) and of_one_host(case)
    if on_rows or suffices is not None:
        with suppress(torch.OutOfMemoryError):  # the model refuses so many rows
            step = of_all(fakes, case.size)
    if step is not None and suffices is not None:
        found = of_full_batch(case, state, available, suffices, step)
        if found is not None:
            return found
    if on_rows and step is not None and _fit_few_rows(case, step, case.size, spare, fast=True):
        # A meter stops a step behind the kernel that has passed a limit.
        most = available - sum(state[1].values()) - _of_one_kernel(step)
        # Fakes hold a little more in one sample than real rows, and a plan at its floor is theirs
        # (test_it_is_exact_with_a_budget_and_without_gradients).
        single = fakes if suffices is None else None
        found, inspected = _on_few_rows(case, state, step, spare, most, single)
        if found is not None:
            return replace(found, how=ROWS_AND_FAKES, case=fakes)
    line = _line([rehearsal.full_batch(fakes, n)[0] for n in sizes], sizes, FAKE)
    inspected = inspected or _inspected(fakes, SIZES, FAKE)
    return _rehearsed(fakes, state, FAKE, sizes, inspected=inspected, undivided=line)


def _on_few_rows(
    case: Case, state: State, step: Timeline, spare: int, most: int, single: Case | None
) -> tuple[Forecast | None, Inspected | None]:
    """Return the forecast of real rows, and the first inspection of them, as far as these tell.

    None for a forecast where more rows may not be foreseen by these, or where these do not fit in
    `spare` bytes; their steps are stopped at `most`. Undivided they must lead to the bytes of
    `step`, that of all rows on fakes. `single` are fakes for the inspection and steps of one sample
    each; None for real ones.
    """
    case, inspected = few(case, MICRO_BATCHES * max(SIZES)), None
    undivided = list[Timeline]()
    try:
        inspected = _inspected(single or case, SIZES, FAKE, limit=most)
        inspection = inspected[1]
        case = unharmed(case, MICRO_BATCHES * max(SIZES), writes=inspection.copies)
        for n in (*SIZES, *([SMALL + 2] if inspection.coupled else [])):
            small, entries = rehearsal.full_batch(case, n, inspection, limit=most)
            if entries or not _fit_few_rows(case, small, n, spare):
                return None, inspected  # sparse sums grow with the batch, which few do not show
            undivided.append(small)
        far = rehearsal.extrapolated(undivided, SMALL, case.size)
        if not rehearsal.holds_all_of(far, step):
            return None, inspected
        # Between its ends a line is above the parabola of a loss of all pairs.
        line = AffineTimeline.through(undivided[0], far, SMALL, case.size)
        found = _rehearsed(case, state, FAKE, inspected=inspected, undivided=line, limit=most)
        if case.trains and not case.lanes:
            run = partial(rehearsal.divided, accumulator=True, limit=most)
            sums = _line((run(case, n, inspection) for n in SIZES), SIZES, FAKE)
            found = replace(found, accumulated=_with_scalar(sums))
        found = replace(found, divided=_with_scalar(found.divided), few=tuple(undivided))
    except (NotAffineError, torch.OutOfMemoryError):
        return None, inspected
    try:
        least = rehearsal.divided(single or case, 1, inspection, accumulator=False)
        found.confirmed[1, case.size, 0, False] = least.plus({} if single else {STEP: SCALAR})
    except Exception as error:
        if out_of_memory(error):
            raise
    return found, inspected  # else the model takes no single sample


def _with_scalar(line: Line) -> AffineTimeline:
    assert isinstance(line, AffineTimeline)
    more = np.array([SCALAR if owner == STEP else 0 for owner in line.owners])
    return replace(line, base=line.base + more)


def _of_one_kernel(step: Timeline) -> int:
    """Return the most bytes that one kernel of a step returns."""
    made = dict[int, int]()
    for owner, count, first, _ in step.spans:
        if owner not in ("parameters", "buffers"):  # which were there before
            made[first] = made.get(first, 0) + count
    return max(made.values(), default=0)


def _fit_few_rows(
    case: Case, undivided: Timeline, size: int, spare: int, *, fast: bool = False
) -> bool:
    """Say whether few real rows fit, by an undivided step of `size`; `fast`: as fast as fakes."""
    own = own_bytes(undivided)
    if fast and size < ROWS and own * COMPUTED > QUICK * size:
        return False
    held = -(-own * SMALL // size) + SMALL * _row(case)
    return max(2 * gradient_bytes(case) + OF_STEP * held, OF_INSPECTION * held) <= spare


def _on_rows(case: Case, state: State, available: int) -> Forecast:
    """Return the forecast of rehearsals on a few real rows."""
    one = _of_one(case, state)
    if one is not None and _held_at(one, case, SMALL + 1) > available:
        return one
    found = _on_real(case, state)
    # Two small steps show little of what larger ones round up, and these have an accumulator, too
    # (test_larger_real_steps_tell_what_two_small_ones_do_not).
    spare = available - found.gradients
    far = next((n for n in FARTHER if NEAR_MARGIN * _held_at(found, case, n) <= spare), None)
    if far is not None:
        try:
            found = _farther(found, few(case, far * MICRO_BATCHES), far)
        except (AnybatchError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # a loss may take no more samples than the batch has
            if far * MICRO_BATCHES <= case.size:
                raise
            far = None
    if far is None:
        rough = _roughly(found.divided), _roughly(found.undivided)
        found = replace(found, divided=rough[0], undivided=rough[1])
    return found if one is None else _from_one(found, one, few(case, MICRO_BATCHES))


def _from_one(found: Forecast, one: Forecast, case: Case) -> Forecast:
    """Return the forecast with micro-batches of one sample as they were measured.

    A line through larger ones is only a guess there, and with few bytes only `one` exists. So the
    floor is the same for any number of bytes.
    """

    def bent(single: Line, line: Line) -> BentTimeline:
        assert isinstance(single, BentTimeline)
        return BentTimeline(single.many if found.how == PEAKS else single.few, line, SMALL)

    sums = found.accumulated
    if sums is not None:
        case = unharmed(case, MICRO_BATCHES, writes=one.inspection.copies)
        single = rehearsal.divided(case, 1, one.inspection, accumulator=case.trains)
        sums = bent(_line([single], (1,), PEAKS, one.entries * case.micro_batches), sums)
    return replace(
        found,
        looked=bent(one.looked, found.looked),
        divided=bent(one.divided, found.divided),
        undivided=bent(one.undivided, found.undivided),
        accumulated=sums,
    )


def _spare(case: Case, held: int, available: int) -> int:
    """Return the bytes of the budget that states and gradients do not hold."""
    modules = [module for _, module in case.modules]
    every = [tensors_of(modules, attribute) for attribute in ("_parameters", "_buffers")]
    there = {id(t): t for t in (*chain(*every), *case.leaves)}.values()
    gradients = (t.grad for t in there if t.grad is not None)
    return max(0, available - held - sum(map(allocated, (*there, *gradients))))


def _of_one(case: Case, state: State) -> Forecast | None:
    """Return a guess from real steps of one sample; None where the model cannot take one."""
    try:
        return _rehearsed(few(case, MICRO_BATCHES), state, PEAKS, (1,))
    except (AnybatchError, torch.OutOfMemoryError):
        raise
    except (ValueError, IndexError, RuntimeError, torch.jit.Error):  # scripts raise what they like
        return None


def _on_real(case: Case, state: State) -> Forecast:
    """Return the forecast of small real steps on a few rows."""
    real = few(case, MICRO_BATCHES * (SMALL + 1))
    try:
        return _rehearsed(real, state, REAL)
    except NotAffineError:
        return _rehearsed(real, state, PEAKS)
    except (AnybatchError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:  # torch does not optimise every script under a dispatch mode
        if not any(isinstance(module, torch.jit.ScriptModule) for _, module in case.modules):
            raise
        raise NotExactError(
            "the kernels of a step must be metered for a budget, and a torch.jit.ScriptModule "
            f"failed there ({str(error).splitlines()[0]}): use the module it was made of, or give "
            "micro_batch= instead of memory="
        ) from error


Inspected = tuple[Line, Inspection]
"""Bytes of the first inspection of a model, and its findings."""


def _inspected(case: Case, sizes: tuple[int, ...], how: str, limit: int | None = None) -> Inspected:
    """Return the first inspection of a model, and its findings and those of a loss."""
    units = [2 * n if n > 1 else 1 for n in sizes]
    looked, looks = zip(
        *[rehearsal.inspect_model(case, n, limit=limit) for n in units], strict=True
    )
    return _line(looked, sizes, how), rehearsal.watch_loss(case, looks[0])


def _rehearsed(
    case: Case,
    state: State,
    how: str,
    sizes: tuple[int, ...] = SIZES,
    *,
    inspected: Inspected | None = None,
    undivided: Line | None = None,
    limit: int | None = None,
) -> Forecast:
    """Return the forecast of dry runs or real steps, at two and three samples.

    An inspection and `undivided` steps that were run before are taken as they are.

    Raises:
        torch.OutOfMemoryError: a divided step holds more than `limit` bytes.
        NotAffineError: they do not show the same events, and `how` is not `PEAKS`.
    """
    looked, inspection = inspected or _inspected(case, sizes, how)
    case = unharmed(case, MICRO_BATCHES * max(sizes), writes=inspection.copies)
    entries = 0
    if undivided is None:
        steps = [rehearsal.full_batch(case, n, inspection) for n in sizes]
        entries = steps[0][1]
        undivided = _line([step for step, _ in steps], sizes, how, entries)
    run = partial(rehearsal.divided, accumulator=False, limit=limit)
    divided, summed = [run(case, n, inspection) for n in sizes], case.global_samples and case.trains
    return Forecast(
        how=how,
        looked=looked,
        divided=_line(divided, sizes, how, entries * case.micro_batches),
        undivided=undivided,
        update=state[0],
        constant=state[1],
        copied=buffer_bytes(case),
        gradients=gradient_bytes(case),
        inspection=inspection,
        case=case if case.fake else None,
        entries=entries,
        micro_batches=case.micro_batches,
        draws=tuple((n, tuple(rehearsal.draws(case, n))) for n in sizes),
        global_samples=case.global_samples,
        pieces=rounded(small_bytes(case.leaves), case.device) if summed else 0,
        shown=inspection.shows if case.outputs else 0,
        grain=rounding(case.device),
    )


def _roughly(line: Line) -> AffineTimeline:
    """Return the line of two small real steps, with a margin for the rounding of larger ones."""
    assert isinstance(line, AffineTimeline)
    steeper = np.where(line.slope > 0, np.ceil(NEAR_MARGIN * line.slope), line.slope)
    slope = steeper.astype(np.int64)
    base = line.base + SMALL * (line.slope - slope)
    column = np.full((len(base), 1), ROUNDING)
    rows = np.hstack([base, column]), np.hstack([slope, 0 * column])
    return AffineTimeline((*line.owners, "rounding"), line.events, *rows)


def _held_at(found: Forecast, case: Case, n: int) -> int:
    """Return the bytes of a rehearsal at `n` samples, with rows that are made for it."""
    rows = 0 if case.rows.size >= n * MICRO_BATCHES else n * MICRO_BATCHES
    return found.peak(n, max(case.size, n + 1)) + rows * _row(case)


def _row(case: Case) -> int:
    """Return the bytes of a row."""
    pair = (case.rows.inputs, case.rows.targets)
    return sum(bytes_of(t[:1]) for _, t in pytree.tensors(pair) if t.dim())


def _farther(found: Forecast, case: Case, far: int) -> Forecast:
    """Return the forecast with lines through larger real steps, in which rounding weighs less."""

    def bent(few_samples: Line, steps: list[Timeline], growing: int) -> BentTimeline:
        assert isinstance(few_samples, AffineTimeline)
        low, *_, near, high = steps
        both = near, high
        if _alike(steps):
            ends = [(low, SMALL), (high, far)]
            column = near.rounded(ends, NEAR, ROUNDING)
            both = column, high.with_owner(column, "rounding")
        try:
            return BentTimeline(few_samples, _line(both, (NEAR, far), found.how), NEAR)
        except NotAffineError:
            return BentTimeline(few_samples, _line(both, (NEAR, far), PEAKS, growing), NEAR)

    def divided(*, accumulator: bool) -> list[Timeline]:
        return [
            rehearsal.divided(case, n, found.inspection, accumulator=accumulator and case.trains)
            for n in (SMALL, SMALL + 1, NEAR, far)
        ]

    summed, growing = divided(accumulator=True), found.entries * case.micro_batches
    first = _line(summed[:2], (SMALL, SMALL + 1), found.how) if _alike(summed) else None
    return replace(
        found,
        divided=bent(found.divided, divided(accumulator=False), growing),
        undivided=bent(
            found.undivided,
            [rehearsal.full_batch(case, n, found.inspection)[0] for n in (SMALL, NEAR, far)],
            found.entries,
        ),
        accumulated=None if first is None else bent(first, summed, growing),
    )


def _alike(steps: list[Timeline]) -> bool:
    return all(step.events == steps[0].events for step in steps)


def _line(steps: Iterable[Timeline], sizes: tuple[int, ...], how: str, growing: int = 0) -> Line:
    """Return the line through two timelines, or through the peaks of one or more.

    Bytes of a dry run at only one sample are counted unchanged. `growing` is as in `bound_of`.
    """
    found = list(steps)
    if sizes == (1,):
        (step,) = found
        exact = AffineTimeline(step.owners, step.events, step.live, 0 * step.live)
        return BentTimeline(exact, bound_of(found, sizes, growing), SMALL)
    if how != PEAKS:
        margin = 1.0 if how == FAKE else FARTHER.get(sizes[1], 1.0)
        return AffineTimeline.through(found[0], found[1], *sizes[:2], margin=margin)
    return bound_of(found, sizes, growing)


def _missing(found: Forecast, case: Case, available: int) -> int:
    """Return the bytes that a small real step holds at its peak and the forecast does not know.

    One sample is run wherever it fits, so more bytes make no forecast smaller there. Where it does
    not fit, nothing is run, and the forecast is taken as it is.
    """
    sizes = [n for n in (1, SMALL) if _held_at(found, case, n) <= available]
    return max((_missing_at(n, found, case, fewer=n < sizes[-1]) for n in sizes), default=0)


def _missing_at(n: int, found: Forecast, case: Case, *, fewer: bool) -> int:
    """Return these bytes at `n` samples a micro-batch; 0 where the model cannot take so few.

    Where more samples are run, too, an exception with `fewer` is no error of the step.
    """
    fakes = found.case
    assert fakes is not None
    real = unharmed(few(case, n * MICRO_BATCHES), n * MICRO_BATCHES, writes=found.inspection.copies)
    try:  # what all outputs need may hide what a micro-batch needs, so undivided too
        if n == SMALL and not fakes.chunked:
            divided, undivided = found.divided.at(n).peak, found.undivided.at(n).peak
        else:
            again = found.divides(n, fakes.size)  # a plan names the bytes of one sample, too
            step = found.rehearsed(n, fakes.size, accumulator=False) if again else None
            divided = step.peak if step else _divided(fakes, found, n)
            undivided = rehearsal.full_batch(fakes, n, found.inspection)[0].peak
        all_at_once = rehearsal.full_batch(real, n, found.inspection)[0].peak
        return max(_divided(real, found, n) - divided, all_at_once - undivided)
    except Exception as error:
        few_rows = fewer or isinstance(error, ValueError | IndexError)
        refused = isinstance(error, AnybatchError) and not fewer
        if out_of_memory(error) or refused or not few_rows:
            raise
        return 0  # too few rows: there is nothing to compare


def _divided(case: Case, found: Forecast, n: int) -> int:
    return rehearsal.divided(case, n, found.inspection, accumulator=False).peak
