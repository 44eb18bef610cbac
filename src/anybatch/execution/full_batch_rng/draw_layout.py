"""Layouts of a model's draws, learnt from forwards of few rows and confirmed by trials.

No shape shows which of its dimensions are samples: a micro-batch of 8 with 8 features draws [8, 8].
So the model is called at several numbers of rows with the same RNG, and the same draws are
compared: the dimension that has grown holds the samples. Where it holds several entries a sample,
one sample's are made NaN, and must show in that sample's outputs and in no other's. At last the
smaller batch is drawn as a part of the larger one, and its outputs must be those rows of it.

    8 rows   [8, 8, 5]    [16, 5]       dimension 0 of both grows, two entries a sample in one
    4 rows   [4, 8, 5]    [8, 5]        drawn as 4 of the 8, they give the outputs of these
    7 rows   [7, 8, 5]    [14, 5]       an odd number, where there is one

Draws with a known layout are made for the full batch, so a branch that is chosen at random is the
one that the step will take; after one without, the RNG advances equally at every size.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.core import accelerators, modules, pytree
from anybatch.core.batch import MicroBatch, copied, made_up
from anybatch.core.modules import DispatchMode, call_model
from anybatch.core.oom import out_of_memory
from anybatch.core.python_state import PythonState, places
from anybatch.core.rng import RNGState
from anybatch.distributed.local_batch import Layout
from anybatch.errors import AnybatchError, NotExactError
from anybatch.execution.few_rows import (
    layout_of,
    quietly,
    rough_layout,
    row_mismatch,
    turned,
    two_sizes,
)
from anybatch.execution.full_batch_rng.kernels import (
    WAY_OUT,
    Draw,
    category_of,
    fault_of,
    refuse_generator,
    unmoved,
)
from anybatch.execution.full_batch_rng.law import Law, Pattern, RowRange, candidates, fitted
from anybatch.execution.full_batch_rng.mode import SharedDraws, Site, site
from anybatch.execution.proof.rows import saving_nothing
from anybatch.execution.step import NO_GRAPH, Step

FEW = 8
"""Rows from which layouts are learnt, or fewer if there are fewer; more if the model needs them."""


class DrawnForward(NamedTuple):
    """One forward: its draws, its outputs, and the RNG state after it."""

    draws: list[EncounteredDraw]
    outputs: Any
    rng: RNGState


def learn(step: Step) -> None:
    """Learn the layouts of the draws that the step will make and that have none yet.

    RNGState, buffers and attributes are left as they were.
    """
    assert step.draws is not None
    rng = RNGState.now()
    try:
        with attributes_of(step), quietly(), torch.no_grad():
            full, part = two_sizes(step) if step.batch.size else _made_up(step)
            start, few = RNGState.now(), _fewer(full)
            pairs = ([few] if full.size > FEW else []) + [(full, part)]
            if not any(Lesson(step, start, *pair).run() for pair in pairs):
                raise NotExactError(
                    "the layout of a full-batch draw is found by forwards of several sizes, and "
                    f"the model cannot be called with {part.size} rows: give larger micro-batches. "
                    f"{WAY_OUT}"
                )
    except BaseException:
        step.draws.shared.laws.requested.clear()  # nothing has been learnt
        raise
    finally:
        step.buffers.restart()
        step.forget_casts()
        rng.put_back()


@contextmanager
def attributes_of(step: Step) -> Iterator[None]:
    """Restore attributes that forward sets on modules in the body, as it is only an inspection."""
    saved = PythonState()
    saved.modules(step.model.modules(), attributes=True)
    try:
        yield
    finally:
        saved.put_back()


def _fewer(full: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
    """Return a few rows, and the last half of these in reverse."""
    few, half = pytree.rows(full.inputs, 0, FEW, full.size), FEW // 2
    last = turned(pytree.rows(few, FEW - half, FEW, FEW), half)
    return MicroBatch(few, None, FEW), MicroBatch(last, None, half)


def _made_up(step: Step) -> tuple[MicroBatch, MicroBatch]:
    """Return rows of a rank that has none, and the last half of these in reverse."""
    full = made_up(step.batch, max(2, min(FEW, step.global_batch.size)))
    half = full.size // 2
    rows = pytree.rows(full.inputs, full.size - half, full.size, full.size)
    return full, MicroBatch(turned(rows, half), None, half)


class Lesson:
    """The forwards from which layouts are learnt; `run` runs them."""

    def __init__(self, step: Step, rng: RNGState, full: MicroBatch, part: MicroBatch) -> None:
        assert step.draws is not None
        self._step, self._shared = step, step.draws.shared
        self._full, self._part = full, part
        self._start = rng
        self._fitted: dict[int, Law] = {}

    def run(self) -> bool:
        """Call the model, and learn from its draws; return whether it could be called."""
        full, part = self._full, self._part
        first = self._call_of_fewer(full)
        second = None if first is None else self._call_of_fewer(part)
        if first is None or second is None:
            return False
        runs = [(full.size, first), (part.size, second), *self._odd()]
        self._fit(runs)
        layout = self._layout(first, second)
        self._settle(second if part.size > 1 else first, part if part.size > 1 else full, layout)
        if not all(run.rng.others_as(first.rng) for _, run in runs):
            raise NotExactError(
                "forward must draw as often for any number of samples, and it draws from random "
                f"or numpy once a sample: draw with torch, for all of them. {WAY_OUT}"
            )
        self._compare(first, layout)
        for index, law in self._fitted.items():
            draw = first.draws[index]
            self._shared.laws.add(draw.place, draw.number, law)
        self._shared.laws.steady = True
        return True

    def _odd(self) -> list[tuple[int, DrawnForward]]:
        """Return a forward of one row less, where the model can take that."""
        full, n = self._full, self._full.size - 1
        if n in (0, self._part.size):
            return []
        run = self._call_of_fewer(MicroBatch(pytree.rows(full.inputs, 0, n, n + 1), None, n))
        return [] if run is None else [(n, run._replace(outputs=None))]

    def _compare(self, first: DrawnForward, layout: Layout) -> None:
        """Check that rows drawn as a part of more give the same outputs as among these."""
        n, m = self._full.size, self._part.size
        again = self._call(self._part, RowRange(n - m, m, n, turned=True))
        gap = row_mismatch(first.outputs, again.outputs, layout, m)
        if gap is not None and not self._step.local:
            raise NotExactError(
                "rows drawn as a part of a larger batch must give the same outputs as in it, and "
                f"{gap}: forward draws from a generator of its own, or samples meet by a draw (a "
                f"permutation of them). {WAY_OUT}"
            )

    def _call(
        self, micro: MicroBatch, among: RowRange | None = None, mark: Mark | None = None
    ) -> DrawnForward:
        """Call the model from the RNG state of the start."""
        step, n = self._step, micro.size
        reverse = micro is self._part
        begin = self._full.size - n if reverse else 0
        rows = self._shared.rows(begin, n, turned=reverse)

        def call() -> DrawnForward:
            among_all = among or RowRange(0, n, n)
            mode = Learning(self._shared, rows, among_all, dict(self._fitted), mark)
            self._start.put_back()
            try:
                with mode, torch.set_grad_enabled(self._shared.laws.graph):
                    inputs = (copied(micro) if step.traits.copies else micro).inputs
                    outputs = step.loss.run(partial(call_model, step.model, inputs), inputs)
                outputs = pytree.map_tensors(Tensor.detach, outputs)
                return DrawnForward(mode.draws, outputs, RNGState.now())
            finally:
                step.buffers.restart()

        return saving_nothing(call)  # type: ignore[no-any-return]

    def _call_of_fewer(self, micro: MicroBatch, mark: Mark | None = None) -> DrawnForward | None:
        """Return None where the model cannot take these rows, or NaN."""
        outside = sys.exception()
        try:
            return self._call(micro, None, mark)
        except AnybatchError:
            raise
        except Exception as error:
            if isinstance(error, RuntimeError) and modules.NONE in str(error):
                raise NotExactError(NO_GRAPH) from error
            expected = mark is not None or isinstance(error, RuntimeError | ValueError | IndexError)
            if not expected or out_of_memory(error, outside=outside):
                raise
            return None

    def _fit(self, runs: list[tuple[int, DrawnForward]]) -> None:
        """Find the layouts of the draws; all runs must have made the same draws."""
        counts = [n for n, _ in runs]
        for same in zip_longest(*(run.draws for _, run in runs)):
            there = [draw for draw in same if draw is not None]
            if len(there) < len(runs) or len({_key(draw) for draw in there}) > 1:
                raise _refused(there[0], "how often forward draws depends on the samples")
        for index, same in enumerate(zip(*(run.draws for _, run in runs), strict=True)):
            law = fitted([draw.pattern for draw in same], counts)
            if law is None:
                shapes = ", ".join(
                    f"{draw.pattern.sizes} for {n}" for draw, n in zip(same, counts, strict=True)
                )
                raise _refused(same[0], f"its shape does not grow with the samples: {shapes}")
            fault = fault_of(same[0].name, law, len(same[0].pattern.sizes))
            if fault is not None:
                raise _refused(same[0], fault)
            self._fitted[index] = law

    def _layout(self, first: DrawnForward, second: DrawnForward) -> Layout:
        step = self._step
        if step.traits.layout:
            return step.traits.layout
        n, m = self._full.size, self._part.size
        if step.loss.takes_outputs:
            return layout_of(first.outputs, second.outputs, n, m)
        return rough_layout(first.outputs, second.outputs, n, m)

    def _settle(self, base: DrawnForward, micro: MicroBatch, layout: Layout) -> None:
        """Find how the entries of a sample lie, where a draw has several along its dimension."""

        def call(mark: Mark) -> Any:
            run = self._call_of_fewer(micro, mark)
            return None if run is None else run.outputs

        for index, law in self._fitted.items():
            draw, n = base.draws[index], micro.size
            if law.dim is None or draw.pattern.sizes[law.dim] == n:
                continue
            trial = Trial(index, call, base.outputs, layout, n)
            choices = candidates(law, draw.pattern.sizes[law.dim], n)
            found = next((one for one in choices if trial.holds(one)), None)
            if found is None:
                raise _refused(draw, HIDDEN)
            self._fitted[index] = found


def _key(draw: EncounteredDraw) -> tuple[Any, ...]:
    return draw.place.chain, draw.number, draw.func


def _refused(draw: EncounteredDraw, why: str) -> NotExactError:
    return NotExactError(
        f"random draws must be those of the full batch, and {draw.name} at {draw.place.words} "
        f"cannot be: {why}. {WAY_OUT}"
    )


# Draws of unknown layout: recorded, made for the present rows, and changed for a trial.


class EncounteredDraw(NamedTuple):
    """Draw of unknown layout, as one forward has recorded it; it holds no tensor."""

    place: Site
    number: int
    func: Any
    name: str
    pattern: Pattern


class Mark(NamedTuple):
    """NaN in one sample's entries of a draw, which is at a place among those of unknown layout.

    A law selects the entries. With another salt the draws behind it come out otherwise.
    """

    draw: int
    law: Law
    sample: int
    salt: int


class Learning(DispatchMode):
    """Dispatch mode that records draws of unknown layout, for its rows or a few more.

    Draws that `shared` knows are made for the full batch. `fitted` layouts, by their place among
    those of unknown layout, draw for as many rows as `among` says, which has the place of the rows.
    """

    def __init__(
        self,
        shared: SharedDraws,
        rows: RowRange,
        among: RowRange,
        fitted: dict[int, Law],
        mark: Mark | None = None,
    ) -> None:
        super().__init__()
        self.draws: list[EncounteredDraw] = []
        self._shared, self._rows, self._among = shared, rows, among
        self._fitted, self._mark = fitted, mark
        self._numbers: dict[tuple[int, ...], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one kernel, and note it if it draws."""
        kwargs, category = kwargs or {}, category_of(func)
        if not category:
            return func(*args, **kwargs)
        if category in ("stateful", "unknown"):
            return unmoved(func, args, kwargs)
        draw = Draw(func, args, kwargs, category)
        if draw.idle:
            return draw.plain()
        refuse_generator(draw)
        place = site(self._shared.modules)
        number = self._numbers[place.chain] = self._numbers.get(place.chain, -1) + 1
        with torch._C.DisableTorchFunction():
            law = self._shared.laws.find(place, number)
            result = None if law is None else _drawn(draw, law, self._rows)
            return self._unknown(draw, place, number) if result is None else result

    def _unknown(self, draw: Draw, place: Site, number: int) -> Any:
        index, before = len(self.draws), torch.get_rng_state()
        self.draws.append(EncounteredDraw(place, number, draw.func, draw.name, draw.pattern))
        law = self._fitted.get(index)
        result = None if law is None else _drawn(draw, law, self._among)
        result = draw.plain() if result is None else result
        if self._mark is not None and self._mark.draw == index:
            _set_nan(self._mark, result, self._rows.size)
        salt = 0 if self._mark is None else self._mark.salt
        _seed(zlib.crc32(before.numpy().tobytes(), salt))  # `hash` differs between processes
        return result


def _set_nan(mark: Mark, result: Any, n: int) -> None:
    """Make the marked entries NaN, where the dtype has it."""
    drawn: Tensor = result[0] if isinstance(result, tuple) else result
    if drawn.is_floating_point() or drawn.is_complex():
        mark.law.of_sample(drawn, mark.sample, n).fill_(torch.nan)


def _drawn(draw: Draw, law: Law, rows: RowRange) -> Any:
    """Draw by a layout; None if it is not this draw's."""
    full = law.full_pattern(draw.pattern, rows)
    if full is None:
        return None
    return draw.plain() if law.dim is None else draw.draw_full(law, full, rows)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    accelerators.seed(seed)


# Trials of each sample's entries of a draw: a change of them must show in that sample only.
#
# NaN goes through every product, also with a weight that is still zero; a comparison ends it, and
# the draw is refused ("two views by comparison" in test_dice_attacked.py).

TRIES = 6
"""How often a draw is tried at most."""

ENOUGH = 2
"""How often it has to show."""

HIDDEN = (
    "no sample's outputs show which of its entries are theirs, as where a comparison (rand(n) > p) "
    "ends the NaN put there: draw [samples, entries], and flatten the draw"
)
"""Why a draw is refused whose entries no trial assigns."""


class Trial(NamedTuple):
    """Trial that finds the layout of one draw.

    Attributes:
        draw: its place among those of unknown layout.
        call: returns the outputs of forward where one sample's entries are marked; None where the
            model cannot take that.
        outputs: those where nothing is marked.
        layout: where they hold the samples.
        size: how many samples.
    """

    draw: int
    call: Callable[[Mark], Any]
    outputs: Any
    layout: Layout
    size: int

    def holds(self, law: Law) -> bool:
        """Say whether a layout assigns the first and the last sample their own entries."""
        return all(self._reached(law, sample) == {sample} for sample in {0, self.size - 1})

    def _reached(self, law: Law, sample: int) -> set[int]:
        """Return the samples with outputs that depend on the entries of one sample by `law`.

        Dropout may have dropped the entries that would show it, so it is tried until shown twice.
        """
        found: list[set[int]] = []
        for salt in range(TRIES):
            marked = self.call(Mark(self.draw, law, sample, salt))
            found += [reached] if marked is not None and (reached := self._nans(marked)) else []
            if len(found) == ENOUGH:
                break
        return set().union(*found)

    def _nans(self, marked: Any) -> set[int]:
        """Return the samples with NaN in these outputs and not in those of no mark."""
        found: set[int] = set()
        pairs = zip(pytree.tensors(marked), pytree.tensors(self.outputs), strict=False)
        for ((_, a), (_, b)), axis in zip(pairs, self.layout, strict=False):
            if axis is None or a.shape != b.shape or a.layout != torch.strided:
                continue
            where = torch.zeros(a.shape[axis], dtype=torch.bool, device=a.device)
            for place in places(a.shape):
                rows = (a[place].isnan() & ~b[place].isnan()).movedim(axis, 0)
                here = place[axis] if axis < len(place) else slice(None)
                where[here] |= rows.reshape(len(rows), -1).any(1)
            found |= set(where.nonzero().flatten().tolist())
        return found
