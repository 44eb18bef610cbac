"""Dispatch mode in which a micro-batch draws the undivided batch's numbers for its rows.

``torch.random.fork_rng`` gives a micro-batch the RNG state of the step's start, and then it still
draws the numbers of the *first* rows, because a generator returns as many as are requested. So
every draw is made for the full batch, by the same kernel, in the same shape and place in memory,
and the micro-batch gets its rows. All micro-batches then advance the RNG state equally, to that
after the undivided batch.

    RNG at the start ──> mu_0: draw [N, C], keep rows 0..n    ──> RNG as after the full batch
    RNG at the start ──> mu_1: draw [N, C], keep rows n..2n   ──> the same

Recomputation in backward is recognised by the RNG state, which checkpointing restores.

Memory: while a draw is made, there is one of the full batch; it is freed before the next kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from anybatch.core.batch import MicroBatch
from anybatch.core.modules import DispatchMode
from anybatch.core.retry import Retry
from anybatch.core.rng import RNGState
from anybatch.errors import NotExactError
from anybatch.execution.full_batch_rng.kernels import (
    WAY_OUT,
    Draw,
    category_of,
    drawn_late,
    refuse_generator,
    state_now,
    unmoved,
)
from anybatch.execution.full_batch_rng.law import Law, Pattern, RowRange

T = TypeVar("T")
NOWHERE = Pattern((), ())


class FullBatchRNG(DispatchMode):
    """Dispatch mode of full-batch draws, for a micro-batch's forward, loss and backward."""

    def __init__(self, shared: SharedDraws) -> None:
        super().__init__()
        self.shared = shared
        self.rows = RowRange(0, shared.size, shared.size)
        self._on = 0
        self._forward: bool | None = None
        self._count = 0
        self._numbers: dict[tuple[int, ...], int] = {}

    def __enter__(self) -> FullBatchRNG:
        self._on += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._on -= 1
        super().__exit__(*error)

    def of_lane(self) -> FullBatchRNG:
        """Return one for another micro-batch that is under way at the same time."""
        return FullBatchRNG(self.shared)

    def watch(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield micro-batches as they are loaded; the first one computed records the RNG state."""
        shared, loaded = self.shared, iter(micro_batches)
        shared.begin()
        before = RNGState.now() if shared.several else None
        micro = next(loaded, None)
        if before is not None and not before.same_as(RNGState.now()):
            raise _loaded()  # every rank loads other samples
        while micro is not None:
            yield micro
            rng = RNGState.now()
            micro = next(loaded, None)
            if not rng.same_as(RNGState.now()):
                raise _loaded()

    def forward(self, micro: MicroBatch, run: Callable[[], T]) -> T:
        """Run the forward of a micro-batch, from the RNG state of the step's start.

        Raises:
            Retry: a draw has no known layout yet.
            NotExactError: it makes a draw that the full batch would not.
        """
        if not self._on:
            return run()
        shared = self.shared
        shared.laws.graph = torch.is_grad_enabled()
        self.rows = shared.rows(micro.begin, micro.size)
        if shared.start is None:
            shared.start = RNGState.now()
        else:
            shared.start.put_back()
        self._count = 0
        self._numbers.clear()
        self._forward = True
        outputs = run()
        self._forward = False
        self._compare_ends()
        return outputs

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Draw in the body as torch does, because it computes with the full batch."""
        self.shared.paused = True
        try:
            yield
        finally:
            self.shared.paused = False

    @contextmanager
    def full_loss_draws(self) -> Iterator[None]:
        """Draw in the body as torch does, because it computes the loss of the full batch."""
        with self.paused():
            yield
        self.shared.end = RNGState.now()

    def settle(self) -> None:
        """Restore the RNG state as the loss of the full batch has set it."""
        if self.shared.end is not None:
            self.shared.end.put_back()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one kernel; one that draws, for the full batch."""
        kwargs = kwargs or {}
        category = category_of(func)
        if not category or self._forward is None or self.shared.paused:
            return func(*args, **kwargs)
        if category in ("stateful", "unknown"):
            return unmoved(func, args, kwargs)
        draw = Draw(func, args, kwargs, category)
        if draw.idle:
            return draw.plain()
        refuse_generator(draw)
        with torch._C.DisableTorchFunction():
            drawn, full = self._recorded(draw)
            if drawn.law.dim is None:
                return draw.plain()
            return draw.draw_full(drawn.law, full, self.rows)

    def _recorded(self, draw: Draw) -> tuple[Drawn, Pattern]:
        """Return the first micro-batch's draw here, and the pattern of the full-batch draw."""
        shared, state, own = self.shared, state_now(), draw.pattern
        backward = torch._C._current_graph_task_id() != -1
        again = self._again(state, own) if backward or not self._forward else None
        if again is not None:
            return again
        if not self._forward:
            # A loss that draws is computed on the full batch
            # (test_a_declared_loss_that_draws_is_computed_on_the_full_batch).
            raise drawn_late(draw) if backward else Retry("coupled")
        index, self._count = self._count, self._count + 1
        if index < len(shared.draws):
            drawn = shared.draws[index]
            full = drawn.law.full_pattern(own, self.rows)
            if (drawn.func, drawn.state) != (draw.func, state) or not _same(full, drawn.full):
                raise _other(draw)
            assert full is not None
            return drawn, full
        if shared.end is not None:
            raise _other(draw)
        law, full = self._law(draw, own)
        drawn = Drawn(draw.func, law, full, state)
        shared.draws.append(drawn)
        twin = shared.by_state.get(state)
        if twin is not None and twin.law != law:  # the RNG was set by hand: which is meant?
            drawn = Drawn(draw.func, law, NOWHERE, state)
        shared.by_state[state] = drawn
        return shared.draws[-1], full

    def _again(self, state: Any, own: Pattern) -> tuple[Drawn, Pattern] | None:
        """Return a draw of forward that is made again, by the RNG state."""
        drawn = self.shared.by_state.get(state)
        full = None if drawn is None else drawn.law.full_pattern(own, self.rows)
        return (drawn, full) if drawn and full and _same(full, drawn.full) else None

    def _law(self, draw: Draw, own: Pattern) -> tuple[Law, Pattern]:
        place = site(self.shared.modules)
        number = self._numbers[place.chain] = self._numbers.get(place.chain, -1) + 1
        law = self.shared.laws.find(place, number)
        full = None if law is None else law.full_pattern(own, self.rows)
        if law is None or full is None:
            ask(self.shared.laws, (place.chain, number, law), f"{draw.name} at {place.words}")
            raise Retry("draws")
        return law, full

    def _compare_ends(self) -> None:
        """Check that every micro-batch ends with the RNG state of the first."""
        shared = self.shared
        assert shared.start is not None
        now = RNGState.now()
        if shared.end is not None:
            if self._count != len(shared.draws) or not now.same_as(shared.end):
                raise NotExactError(
                    "every micro-batch must draw as often as the others, and one has left the "
                    "random generators in another state: the draws of forward depend on the "
                    f"samples. {WAY_OUT}"
                )
            return
        if not shared.laws.steady and not now.others_as(shared.start):
            ask(shared.laws, "random", "a draw from random or numpy")
            raise Retry("draws")
        shared.end = now
        shared.laws.requested.clear()


def _same(one: Pattern | None, other: Pattern) -> bool:
    return one is not None and one.clean() == other.clean()


def _loaded() -> NotExactError:
    return NotExactError(
        "samples must be loaded without the global random generators, and loading a "
        "micro-batch moved them: the full batch would be loaded before its forward "
        f"draws. Load with workers=1 or more, or draw from a generator. {WAY_OUT}"
    )


def _other(draw: Draw) -> NotExactError:
    return NotExactError(
        f"every micro-batch must draw the same, and one draws {draw.name} where another draws "
        "something else, or in another shape: the model takes another path for other samples. "
        f"{WAY_OUT}"
    )


# Layouts of the draws of a model, and the state of draws that a step's micro-batches share.


class Laws:
    """Layouts of the draws of one signature, by call site.

    Attributes:
        steady: draws of forward from Python and numpy do not depend on the number of rows.
        graph: forward runs with gradients, or without: one that asks may draw at another place.
        requested: call sites without a layout when layouts were learnt last.
    """

    def __init__(self) -> None:
        self.steady = self.graph = False
        self.requested: set[Any] = set()
        self._laws: dict[tuple[int, ...], dict[int, Law]] = {}
        self._held: list[Site] = []

    def find(self, place: Site, number: int) -> Law | None:
        """Return the layout of a draw by call site and number; None where it has none."""
        laws = self._laws.get(place.chain, {})
        if number in laws:
            return laws[number]
        same = set(laws.values())
        return next(iter(same)) if len(same) == 1 else None

    def add(self, place: Site, number: int, law: Law) -> None:
        """Record a layout."""
        self._held.append(place)
        self._laws.setdefault(place.chain, {})[number] = law


@dataclass
class Drawn:
    """One draw of a step, as the first micro-batch has made it."""

    func: Any
    law: Law
    full: Pattern
    state: Any


@dataclass
class SharedDraws:
    """State of draws that the micro-batches of a step share.

    Attributes:
        laws: the recorded layouts of draws.
        size: N_B, samples in the mini-batch, over all ranks.
        modules: ids of the modules of the model.
        before: samples of the ranks before this one.
        several: there are other ranks.
        start: the RNG state with which every micro-batch begins.
        end: the state after the forward of one.
        draws: of the forward of the first micro-batch, in order.
        paused: draws are now the full batch's own.
    """

    laws: Laws
    size: int
    modules: Collection[int]
    before: int = 0
    several: bool = False
    start: RNGState | None = None
    end: RNGState | None = None
    draws: list[Drawn] = field(default_factory=list)
    by_state: dict[Any, Drawn] = field(default_factory=dict)
    paused: bool = False

    def begin(self) -> None:
        """Drop the recorded draws: the first micro-batch begins, perhaps again."""
        self.start = self.end = None
        self.draws.clear()
        self.by_state.clear()

    def rows(self, begin: int, size: int, *, turned: bool = False) -> RowRange:
        """Return where rows of this rank are among those of all.

        An inspection may have more rows than there are, from a rank that has one sample or none.
        """
        of = max(self.size, size)
        return RowRange(min(self.before + begin, of - size), size, of, turned)


def ask(laws: Laws, what: Any, words: str) -> None:
    """Note that something has to be learnt; refuse it where that has not helped."""
    if what in laws.requested:
        raise NotExactError(
            f"a draw must be found again when forward is called again, and {words} is not: how "
            f"often forward draws, or what shape, depends on more than the samples. {WAY_OUT}"
        )
    laws.requested.add(what)


# Place of a draw in a program, by which the next step finds it again.
#
# The k-th draw of a forward pass is another one once a layer is skipped at random. The call site
# does not change: the chain of calls that leads to it, and the modules whose calls are among these.
# A checkpointed part is recomputed under another chain; it is recognised by the RNG state, which
# checkpointing restores.

CALL: CodeType = nn.Module._call_impl.__code__
OUTSIDE = ("anybatch.execution.step", "anybatch.core.modules")
"""The modules that call the model: frames before them are the same for all draws."""

OURS = "anybatch."
"""Modules whose frames are no part of a place: tiles of tokens call forwards in some calls alone
(test_draws_beside_tiles_are_found_again)."""

COMPILED = "compile_wrapper"
"""The function of torch in which compiled code is called."""


class Site(NamedTuple):
    """A place in a program: a number for each call and each module, and words for people.

    The code objects of the ids are kept alive.
    """

    chain: tuple[int, ...]
    words: str
    codes: tuple[CodeType, ...]


def site(modules: Collection[int]) -> Site:
    """Return the place in the program that requested the present draw.

    `modules` are ids of the modules of the model; others come and go.
    """
    frame: FrameType | None = sys._getframe(1)
    chain, codes, words = list[int](), list[CodeType](), ""
    while frame is not None and frame.f_globals.get("__name__") not in OUTSIDE:
        if frame.f_globals.get("__name__", "").startswith(OURS):
            frame = frame.f_back
            continue
        code = frame.f_code
        if code.co_name == COMPILED:
            raise NotExactError(
                "random draws of a compiled model cannot be those of the full batch: its kernels "
                'draw otherwise than what they were made of. Use rng="micro_batch", or do not '
                "compile"
            )
        chain += [id(code), frame.f_lasti]
        codes.append(code)
        if code is CALL:
            module = id(frame.f_locals.get("self"))
            chain.append(module if module in modules else 0)
        if not words and not _of_torch(frame):
            words = f"{code.co_filename.rpartition('/')[2]}, line {frame.f_lineno}"
        frame = frame.f_back
    return Site(tuple(chain), words or "a module of torch", tuple(codes))


def _of_torch(frame: Any) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in (torch.__name__, "anybatch")
