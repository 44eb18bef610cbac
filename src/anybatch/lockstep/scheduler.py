"""Lockstep scheduler: each micro-batch is a thread, and a token lets exactly one of them run.

A model with BatchNorm cannot see its micro-batches one after another: the first needs the
statistics of the last. Here every micro-batch runs up to where samples meet, hands over its part
and waits; the last one to come combines, and all go on from there. The model is not rewritten and
not cut into pieces, because a thread can stop anywhere.

    turns:    0 ─> 1 ─> 2 ─┐ meet       the last goes on at once, so the order turns around:
              0 <─ 1 <─ 2 <┘            what it holds need not leave and come back
              └> 0 ─> 1 ─> 2            and so on, in forward and in backward

Nothing runs in parallel: one lane computes, the others wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from anybatch.core import accelerators, threads
from anybatch.core.accelerator import States
from anybatch.core.accelerators import library_switches
from anybatch.core.barrier import Site, Way, forwards_here, meeting_in
from anybatch.core.modules import Modules
from anybatch.core.python_state import PythonState, appended, entries_of, fill
from anybatch.core.rng import RNGState
from anybatch.core.transaction import uninterrupted
from anybatch.distributed.local_batch import LocalBatch
from anybatch.errors import LockstepError, NotExactError
from anybatch.execution.gradients import Gradients
from anybatch.execution.proof.follow import Follow
from anybatch.memory.lane_pager import LanePager

END = "the end"
"""The key with which a lane ends."""

NOTICE = 0.2
"""Seconds after which a Ctrl-C is noticed at the latest."""


class Turns(Protocol):
    """Hooks that run where the token passes between lanes."""

    def begin(self, lane: int) -> None:
        """Give the token to a lane."""

    def pass_token(self, lane: int, coming: list[int]) -> None:
        """Pass the token on from a lane; `coming` lists the next lanes, in order."""

    def around(self, lane: int) -> None:
        """Continue the last lane at once, after all lanes have reached the barrier."""


class NoThreadError(RuntimeError):
    """There are more lanes than the system has threads, or memory for them."""


class LaneLeft(BaseException):
    """Unwinds a lane that waits, because another one has failed."""


class Lanes:
    """Runs `count` lanes in lockstep.

    Args:
        count: lanes.
        turns: hooks that are called whenever the token is passed.
        entered: returns the context of a lane: the modes of the thread that started them.
        beyond: adds the parts of other processes; None (default) where there are none.
    """

    def __init__(
        self,
        count: int,
        turns: Turns,
        entered: Callable[[], AbstractContextManager[Any]],
        beyond: LocalBatch | None = None,
    ) -> None:
        self._count, self._turns, self._entered = count, turns, entered
        self._beyond = beyond
        self._go = [threading.Semaphore(0) for _ in range(count)]
        self._order = list(range(count))
        self._at = 0
        self._keys: list[Any] = [None] * count
        self._parts: list[Any] = [None] * count
        self._results: list[Any] = [None] * count
        self._shared: list[tuple[Tensor, int, tuple[int, ...]]] = []
        self._alive: set[int] = set()
        self._over = threading.Lock()  # free when all have ended
        self._over.acquire()
        self._failure: BaseException | None = None

    def run(self, work: Callable[[int], None], listen: Callable[[], None] = lambda: None) -> None:
        """Run ``work(lane)`` for every lane, and return when all have ended.

        Args:
            work: the function of a lane.
            listen: called now and then while they run; may raise, which ends them. Default nothing.

        Raises:
            LockstepError: the lanes do not meet in the same places.
            NoThreadError: the system starts no thread for each of them.
            BaseException: the exception of the first lane that failed; the others were unwound.
        """
        started: list[threads.Task] = []
        begun = False
        try:
            with uninterrupted():
                for lane in self._order:
                    started.append(self._start(partial(self._lane, lane, work), len(started)))
                    self._alive.add(lane)
                self._go[0].release()
                begun = True
            while not self._over.acquire(timeout=NOTICE):
                listen()
        except BaseException as error:  # Ctrl-C: the lane that runs ends at its next meeting
            self._failure = self._failure or error
            with uninterrupted():
                if started and not begun:  # no more threads could be started
                    self._go[0].release()
                _wait(started)
        else:
            with uninterrupted():
                _wait(started)
        failure, self._failure = self._failure, None
        if failure is not None:
            try:
                raise failure
            finally:
                del failure

    def _start(self, work: Callable[[], None], started: int) -> threads.Task:
        try:
            return threads.start_task(work)
        except (RuntimeError, MemoryError) as error:
            stack = threads.stack_size() or "of the system's size (ulimit -s)"
            raise NoThreadError(
                f"micro-batches that wait for each other need a thread each, and of {self._count} "
                f"threads the system started {started}; a limit on the process's memory counts "
                f"their full stacks (now {stack}): give a larger micro_batch, raise the limit, or "
                "call threading.stack_size(2**20) before the step"
            ) from error

    def exchange(self, key: Any, part: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Wait for all lanes at a barrier; the last combines their parts without a barrier."""
        lane = self._arrive(key)
        self._parts[lane] = part
        del part
        if self._at < self._count - 1:
            self._hand_on(lane)
        else:
            parts, self._parts = self._parts, [None] * self._count
            with meeting_in(None):
                self._results = list(combine(parts))
            self._reverse_order(lane)
        result, self._results[lane] = self._results[lane], None
        return result

    def reduce(
        self,
        key: Any,
        part: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        finish: Callable[[Any], Any],
    ) -> Any:
        """Wait for all lanes; each adds its part to the sum as it comes."""
        lane = self._arrive(key)
        self._parts[0] = part() if self._at == 0 else add(self._parts[0], part())
        if self._at < self._count - 1:
            self._hand_on(lane)
        else:
            total, self._parts[0] = self._parts[0], None
            if self._beyond is not None:
                with meeting_in(None):
                    total = self._beyond.reduce(key, total, add)
            self._results = [finish(total)] * self._count
            self._reverse_order(lane)
        result, self._results[lane] = self._results[lane], None
        return result

    def gather(self, key: Any, rows: Tensor) -> tuple[Tensor, int]:
        """Wait for all lanes; return the rows of all of them, and where these begin."""

        def combine(parts: list[Tensor]) -> list[tuple[Tensor, int]]:
            joined, begin = torch.cat(parts), 0
            if self._beyond is not None:
                joined, begin = self._beyond.gather(key, joined)
            before = accumulate(map(len, parts), initial=begin)
            return [(joined, first) for first, _ in zip(before, parts, strict=False)]

        found: tuple[Tensor, int] = self.exchange(key, rows, combine)
        return found

    def share(self, rows: Tensor) -> None:
        """Refuse writes to rows that all lanes have, also after a lane has dropped them."""
        counter = rows.detach()  # without memory, it still counts what is written to the rows
        counter.data = rows.new_empty(0)
        self._shared.append((counter, rows._version, tuple(rows.shape)))

    def _arrive(self, key: Any) -> int:
        """Return the lane that has reached the barrier of `key`."""
        if self._failure is not None:
            raise LaneLeft
        for counter, version, shape in self._shared:
            if counter._version != version:
                raise NotExactError(
                    "rows of the full batch must not be written to, because all micro-batches have "
                    "the same tensor, and forward writes to what gather_batch returned, of shape "
                    f"{shape}: write others = others.clone() first"
                )
        lane, first = self._order[self._at], self._order[0]
        self._keys[lane] = key
        if key != self._keys[first]:
            places = str(self._keys[first]), str(key)
            raise LockstepError(
                "every micro-batch must reach the same barriers (layers where samples meet), and "
                f"micro-batch {first} is at {self._keys[first]} while micro-batch {lane} is at "
                f"{key}: the model takes another path for other samples. {_way_out(places)}or give "
                "micro_batch >= the batch size"
            )
        return lane

    def _reverse_order(self, lane: int) -> None:
        """Let the last lane go on at once."""
        self._order.reverse()
        self._at = 0
        self._turns.around(lane)

    def _hand_on(self, lane: int) -> None:
        self._pass_token(lane)
        self._at += 1
        self._go[self._order[self._at]].release()
        self._go[lane].acquire()
        if self._failure is not None:
            raise LaneLeft
        self._turns.begin(lane)

    def _pass_token(self, lane: int) -> None:
        later = self._order[self._at + 1 :]
        self._turns.pass_token(lane, list(dict.fromkeys([*later, *reversed(self._order)])))

    def _lane(self, lane: int, work: Callable[[int], None]) -> None:
        self._go[lane].acquire()
        drain = torch.ones((), requires_grad=True).clone()  # before all that the lane will make
        try:
            if self._failure is None:
                # The first and the last copies of a lane also run on the caller's stream
                # (test_what_a_lane_copies_before_and_after_its_work_is_on_the_callers_stream).
                with self._entered(), meeting_in(self):
                    self._turns.begin(lane)
                    work(lane)
                    self._arrive(END)  # where nobody waits
                    self._pass_token(lane)
                self._at += 1
        except LaneLeft:
            _drain(drain)
        except BaseException as error:
            self._failure = self._failure or error
            _drain(drain)
        finally:
            self._alive.discard(lane)
            self._wake()

    def _wake(self) -> None:
        """Pass the token on when a lane is over: to the next, or to one that is to be unwound."""
        if not self._alive:
            self._over.release()
        elif self._failure is not None:
            self._go[min(self._alive)].release()
        else:
            self._go[self._order[self._at]].release()


def _way_out(places: tuple[str, str]) -> str:
    """Return advice for two micro-batches at these barriers, as the beginning of a sentence."""
    if any("coupled" in place or "gather_batch" in place for place in places):
        return "Call it for every micro-batch, and use its result in each loss, "
    return 'Use batchnorm="local", '


def _wait(started: list[threads.Task]) -> None:
    """Wait until all tasks have ended."""
    for task in started:
        task.wait()


def _drain(first: Tensor) -> None:
    """Empty autograd's queue of this thread.

    Tasks of a failed backward would be run by the next backward of this thread, or be freed with
    the thread, after Python has ended its state.

    Args:
        first: made before all else in this thread, so that its backward comes after all else.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        first.backward()  # type: ignore[no-untyped-call]


# RNG state of every lane: its draws do not depend on the lanes that run in between.
#
# A checkpointed part of a model saves the state of the generator and restores it when it
# recomputes. If it has to wait in the middle of that, the others must not find its state, nor move
# it. So torch's generators are swapped with the token, and so is state that forward stores on the
# model. The first lane continues from the state at the beginning of the step, the others from seeds
# drawn from it, without moving it.


class LaneTurns:
    """Switch of torch's generators between lanes, at which the pager frees memory.

    Args:
        lanes: how many.
        slots: attributes and containers that each lane has of its own.
        gradients: those of a lane are added up whenever the token is passed, because the next one's
            must not be added to them in half precision; None (default) where there are none.
        pager: of their tensors; None (default) offloads none.
        everything: Python's and numpy's generators change hands too. Default False.

    Attributes:
        slots: with their contents.
    """

    def __init__(
        self,
        lanes: int,
        slots: Iterable[LaneSlot] = (),
        gradients: Gradients | None = None,
        pager: LanePager | None = None,
        *,
        everything: bool = False,
    ) -> None:
        self._pager, self._gradients = pager, gradients
        self.slots = LaneSlots(slots, lanes)
        self._start = torch.get_rng_state()
        self._states = accelerators.random_states()
        if self._states:  # the thread that begins has one, and autograd's
            accelerators.clear_workspaces()
        source = torch.Generator("cpu")
        source.set_state(self._start)
        self._seeds = torch.randint(2**62, (lanes,), generator=source, device="cpu").tolist()
        self._rng_states: dict[int, RNGState] | None = {} if everything else None
        self._stored: list[tuple[Tensor, States] | None] = [None] * lanes

    def begin(self, lane: int) -> None:
        """Make the lane's state the present one."""
        if self._pager is not None:
            self._pager.begin(lane)
        self.slots.begin(lane)
        stored = self._stored[lane]
        if stored is not None:
            self._put_back(*stored)
        elif lane == 0:
            self._put_back(self._start, self._states)
        else:
            torch.default_generator.manual_seed(self._seeds[lane])
            if self._states:
                accelerators.seed(self._seeds[lane])
        if self._rng_states and lane in self._rng_states:
            self._rng_states[lane].put_back()

    def around(self, lane: int) -> None:
        """Continue a lane: its RNG state is in place."""
        if self._pager is not None:
            self._pager.around(lane)

    def pass_token(self, lane: int, coming: list[int]) -> None:
        """Store the lane's state, and offload tensors beyond the budget."""
        if self._gradients is not None:
            self._gradients.collect()
        if self._pager is not None:
            self._pager.end(lane, coming)
        if self._states:
            accelerators.clear_workspaces()
        self.slots.store(lane)
        states = accelerators.random_states() if self._states else ()
        self._stored[lane] = torch.get_rng_state(), states
        if self._rng_states is not None:
            self._rng_states[lane] = RNGState.now()

    def finish(self) -> None:
        """Restore the RNG state of the first lane, and make the attributes those of all lanes."""
        self.slots.finish()
        stored = self._stored[0]
        if stored is not None:
            self._put_back(*stored)
        if self._rng_states:
            self._rng_states[0].put_back()

    def _put_back(self, cpu: Tensor, states: States) -> None:
        torch.set_rng_state(cpu)
        accelerators.put_random_states(states)


# State that forward sets on a model while it runs: every lane has its own.
#
# A model may store an activation in an attribute and read it some layers later, put features in a
# dict by a hook, or swap its parameters for the time of a call. Run to the end, one forward does
# not disturb the next. Lanes stop in the middle, and one would find the state of another. So the
# inspection compares, at every barrier, the contents of attributes, parameters and containers with
# those before; changed ones are swapped with the token.
#
# Source: found by trying to break lanes; ``threading.local`` of the user's is not carried over.


class LaneInspection:
    """Comparison, wherever samples meet in the first inspection, of state that lanes would share.

    Attributes:
        follow: the mode that follows the forward which runs; None where none does.
        forwards: number of forwards of the inspection.
    """

    def __init__(self, modules: Modules) -> None:
        snapshot = PythonState()
        snapshot.modules((module for _, module in modules), attributes=True)
        self._before = [(held, _print(held)) for held in snapshot.held]
        self._settings = _settings()
        self._changed: dict[int, Any] = {}
        self._sites: list[tuple[int, Site]] = []
        self._first = forwards_here() + 1
        self.follow: Follow | None = None
        self.forwards = 0

    def record_input(self, x: Tensor) -> None:
        """Take in a normalisation of `x`."""
        if self.follow is not None:
            self.follow.record_norm(x)

    def record_site(self, site: Site) -> None:
        """Take in a place where samples meet."""
        self._sites.append((forwards_here(), site))
        self._compare()
        if _settings() != self._settings:
            raise NotExactError(
                "settings that belong to the whole process must not change where micro-batches "
                "wait for each other, and forward changes one where they do (a flag of "
                "torch.backends, the default dtype): set it before the step, "
                "or give micro_batch >= the batch size"
            )

    def slots(self) -> list[LaneSlot]:
        """Return the attributes and containers that every lane must have of its own."""
        self._compare()
        return [LaneSlot(held) for held in self._changed.values()]

    def way(self) -> Way:
        """Return the places where samples meet in the first forward, in order."""
        return tuple(site for forward, site in self._sites if forward == self._first)

    def _compare(self) -> None:
        for held, before in self._before:
            if id(held) not in self._changed and _print(held) != before:
                self._changed[id(held)] = held


@dataclass
class LaneSlot:
    """Attributes or a container that each lane has of its own.

    Attributes:
        held: it.
        sums: keys of numbers to which a forward adds more for more samples. Default: none.
    """

    held: Any
    sums: frozenset[Any] = frozenset()

    def joined(self, start: Any, lanes: Sequence[Any]) -> Any:
        """Return the content after all lanes: the last one's, all sums, and all that was added.

        A count of calls is the same in each lane; a count of samples is not
        (test_numbers_and_logs_of_lanes_are_those_of_all_samples).
        """
        last = lanes[-1]
        if isinstance(start, dict):
            there = [key for key in self.sums if all(key in one for one in (start, *lanes))]
            sums = {key: start[key] + sum(one[key] - start[key] for one in lanes) for key in there}
            return last | sums
        if isinstance(start, set):
            return last.union(*(one - start for one in lanes))
        added = [appended(one, list(start)) for one in lanes]
        entries = [one for one in added if one is not None]
        return [*start, *chain(*entries)] if len(entries) == len(lanes) else last


class LaneSlots:
    """Contents of attributes and containers, stored and restored for each lane.

    Attributes:
        start: content of each slot from before.
        stored: lane -> content of each slot.
    """

    def __init__(self, slots: Iterable[LaneSlot], lanes: int) -> None:
        self._slots = list(slots)
        self.start = self.contents()
        self.stored = [self.start] * lanes

    def contents(self) -> list[Any]:
        """Return the present content of each slot."""
        return [entries_of(slot.held) for slot in self._slots]

    def begin(self, lane: int) -> None:
        """Restore the content that a lane has stored."""
        self._fill(self.stored[lane])

    def store(self, lane: int) -> None:
        """Store the content of a lane."""
        self.stored[lane] = self.contents()

    def finish(self) -> None:
        """Make the content that of all lanes."""
        every = zip(*self.stored, strict=True)
        joined = zip(self._slots, self.start, every, strict=True)
        self._fill([slot.joined(start, lanes) for slot, start, lanes in joined])

    def put_back(self) -> None:
        """Restore the content from before the step."""
        self._fill(self.start)

    def _fill(self, contents: list[Any]) -> None:
        for slot, content in zip(self._slots, contents, strict=True):
            fill(slot.held, content)


def _print(held: Any) -> Any:
    """Return the identity of a container's content: the ids of the objects that it holds."""
    if isinstance(held, dict):
        return tuple(dict.keys(held)), tuple(map(id, dict.values(held)))
    return tuple(map(id, held))


def _settings() -> Any:
    backends = torch.backends
    return (
        torch.get_default_dtype(),
        backends.mkldnn.enabled,
        *library_switches(),
        torch.are_deterministic_algorithms_enabled(),
    )
