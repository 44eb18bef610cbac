"""Saved-tensor hooks of a step: autograd saves a tensor, and asks for it.

``torch.autograd.graph.save_on_cpu`` copies every saved tensor when it is saved, back when it is
requested, and waits for both. Here a recorded step follows its schedule: at every cut some
evictions begin, some have ended, and some prefetches for a later cut begin.

    pack    ──> copies of what was used last begin; what has left gives its memory; returns begin
    kernels        │ a thread writes what leaves, another reads what returns
    unpack  ──> (the same) ... and what is asked for is there, or is waited for

A step that differs from the recording drops its schedule at that cut. From there on everything is
offloaded at once and returns on demand, which is right for any step.

A storage that is computed again must be the one that was dropped. No hook hears of a write through
``.data``, and a kernel may round otherwise, so fingerprints of both are compared.

Source: Hayakawa and Narihira, section 3.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from anybatch.core.accelerator import of
from anybatch.core.modules import PARTS, eager, name_of
from anybatch.core.retry import Retry
from anybatch.core.transaction import uninterrupted
from anybatch.errors import NotReproducibleError
from anybatch.memory.stores import Store
from anybatch.offloading.course import STAYED, Course, Cut, Recording, Remake
from anybatch.offloading.mover import (
    SMALL,
    Fingerprints,
    Handle,
    Mover,
    Saved,
    Stays,
    fingerprint,
    gone,
    probe,
    same,
    uncounted,
)
from anybatch.offloading.recompute import RecomputeRecipe, read
from anybatch.offloading.recorder import (
    Recorded,
    ScheduleCache,
    StepRecorder,
    is_weight,
    link_of,
    may_move,
)


class StepHooks:
    """Saved-tensor hooks of one step: the context of its body.

    For any end of the body, hooks and modes are removed and threads have ended afterwards. The
    offloaded tensors of a failed step are dropped, for nothing can request them any more.

    Args:
        mover: moves storages; after a failure those that it holds are lost.
        device: of tensors that may be offloaded.
        watch: records the step; None follows a course.
        courses: by their first cut.

    Attributes:
        watch: records the step, until that has ended.
        course: the one that is followed; None before the first cut, and off course.
        missed: the step was not one of those that were recorded.
        remade: bytes that were made again.
    """

    def __init__(
        self,
        mover: Mover,
        device: torch.device,
        watch: StepRecorder | None,
        courses: Mapping[Cut, Course],
    ) -> None:
        self.course: Course | None = None
        self.missed = False
        self.remade = 0
        self._mover, self._device, self.watch, self._courses = mover, device, watch, courses
        self._at = self._stage = 0
        self._over = self._failed = False
        self._saved: list[weakref.ref[Saved]] = []
        self._places: dict[int, weakref.ref[Saved]] = {}
        self._recipes: dict[int, RecomputeRecipe] = {}  # to be tried in a step that is recorded
        self._prints: Fingerprints | None = None
        self._lock = threading.RLock()
        self._entered: list[Any] = []

    def __enter__(self) -> Self:
        try:
            with uninterrupted():
                hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
                PARTS.depth = 0  # an interrupt may have skipped the end of a part
                for mode in (hooks, *(() if self.watch is None else (eager(), self.watch))):
                    mode.__enter__()
                    self._entered.append(mode)
        except BaseException:
            self.give_up()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with uninterrupted(once=True):
                self._exit()
                if exc_type is not None:
                    self.give_up()
                else:
                    self._mover.rest()
                    self.end()
        except BaseException:
            self.give_up()
            raise

    def pack(self, tensor: Tensor) -> Handle | Stays:
        """Take a tensor that autograd saves."""
        if PARTS.depth or not may_move(tensor, self._device, SMALL) or is_weight(tensor):
            return Stays(tensor)
        with self._lock:
            self._mover.settle()
            storage = tensor.untyped_storage()
            looks, size = (tensor.shape, tensor.dtype), storage.nbytes()
            saved = self._find(tensor, storage)
            number = len(self._saved) if saved is None else saved.number
            if self._stays(storage, Cut(True, STAYED, looks, size)):
                number = STAYED
            self._cut(Cut(True, number, looks, size))
            packed = Stays(tensor) if number == STAYED else self._take(tensor, storage, saved)
            if self.watch is not None:
                self.watch.resume()
            return packed

    def unpack(self, packed: Handle | Stays) -> Tensor:
        """Return the saved tensor that autograd requests."""
        if isinstance(packed, Stays):
            return packed.unpack()
        packed.check()
        with self._lock:
            self._mover.settle()
            saved = packed.saved
            if self.watch is None:
                _require_counted()
            if not self._over:
                self._cut(Cut(False, saved.number))
            if self.watch is not None:
                self._try(saved, self.watch)
            storage = self._bring(saved)
            if self.watch is not None:
                self.watch.resume()
            return packed.tensor(storage)

    def end(self) -> None:
        """End the step; saved tensors that autograd still holds can still be requested."""
        with self._lock:
            self._over, self.watch = True, None
            self._recipes.clear()
            if self._prints is not None and self._prints.differ():
                raise _other("one of them")
            course = self.course
            if course is not None and self._at < len(course.recording.cuts):
                self.missed = True
            self.course = None

    def give_up(self) -> None:
        """Remove the hooks, and drop all offloaded tensors; another call does no harm.

        The error of a copy holds the frames of the step, those hold its graph, and that holds the
        saved tensors, in cycles that the garbage collector cannot find; so the copies go, too.
        """
        self._exit()
        self._over = self._failed = True
        self.watch = self.course = None
        self._recipes.clear()
        for saved in self._living():
            saved.storage = saved.recipe = None
        self._mover.close()
        for saved in self._living():
            saved.job = None

    def _exit(self) -> None:
        while self._entered:
            self._entered.pop().__exit__(None, None, None)

    def _find(self, tensor: Tensor, storage: Any) -> Saved | None:
        """Return the record of a storage if no write to it has been counted since; else None."""
        place = storage._cdata
        found = self._places.get(place)
        saved = None if found is None else found()
        there = None if saved is None else saved.here()
        if saved is None or there is None or there._cdata != place:
            return None
        if saved.unchanged(tensor) is not False:
            return saved
        if self.watch is not None:
            self.watch.replaced(saved)
        return None

    def _stays(self, storage: Any, cut: Cut) -> bool:
        """Say whether a storage was there before the step."""
        if self.watch is not None:
            return not self.watch.born(storage)
        if self._at == 0:
            return cut in self._courses
        if self.course is None or self._at >= len(self.course.recording.cuts):
            return False
        return self.course.recording.cuts[self._at] == cut

    def _cut(self, cut: Cut) -> None:
        """Run the actions of the course at a cut, or record the cut."""
        if self.watch is not None:
            self.watch.cut(cut)
            return
        if self._at == 0:
            self.course = self._courses.get(cut)
            self.missed = self.course is None
        course = self.course
        if course is not None:
            cuts = course.recording.cuts
            if self._at >= len(cuts) or cuts[self._at] != cut:
                self._abandon_course()
            elif course.stages is not None:
                for number in course.step.made.get(self._at, ()):
                    self._pass(course)
                    self._make(number)
                self._pass(course)
        self._at += 1

    def _pass(self, course: Course) -> None:
        """Go from one stage to the next."""
        assert course.stages is not None
        before, after = course.stages[self._stage : self._stage + 2]
        self._stage += 1
        for saved in self._moving(course, before.outs):
            self._mover.send(saved)
        for saved in self._moving(course, after.frees):
            self._mover.free(saved)
        for saved in self._moving(course, after.ins):
            self._mover.prefetch(saved)

    def _moving(self, course: Course, variables: Iterable[int]) -> Iterator[Saved]:
        """Yield those of a stage's storages that can move: they live, and are not dropped.

        A storage that is recomputed later may be saved more than once before; a schedule moves it
        in between, and it was dropped when it was saved first.
        """
        for v in variables:
            saved = self._saved[course.step.of[v]]()
            if saved is not None and saved.recipe is None:
                yield saved

    def _take(self, tensor: Tensor, storage: Any, saved: Saved | None) -> Handle:
        """Return a handle on a tensor that may be offloaded."""
        if saved is None:
            saved = Saved(len(self._saved), self._mover.key(), tensor, self._mover.ended)
            self._saved.append(weakref.ref(saved))
            self._places[storage._cdata] = weakref.ref(saved)
            if self.watch is not None:
                self.watch.saved(saved)
                self.watch.follow(saved)
                if self.watch.tries and (recipe := read(tensor, self._mine)) is not None:
                    self._recipes[saved.number] = recipe
            if self.course is not None and saved.number in self.course.dropped:
                self._drop(saved, tensor, self.course)
            elif self._on_demand(saved):
                self._mover.send_now(saved)
        elif saved.unchanged(tensor) is None:
            self._join(saved, tensor, storage)
        handle = Handle(saved, tensor)
        if self.watch is not None:
            self.watch.handles(handle, storage)
        return handle

    def _join(self, saved: Saved, tensor: Tensor, storage: Any) -> None:
        """Record another count of writes to a storage, and renew its copy, which lacks them."""
        saved.counts.append((probe(tensor), tensor._version))
        if saved.recipe is None:
            self._mover.renew(saved, storage)
        else:  # what it makes is what was there before those writes
            saved.recipe = None
            saved.holds(storage)
            self._abandon_course()

    def _bring(self, saved: Saved) -> Any:
        """Return a storage, in memory."""
        self._mover.arrived(saved)
        storage = saved.here()
        if storage is None:
            if self._failed:
                raise gone()
            if self.watch is not None:
                self.watch.lives(saved)
            if saved.recipe is None:
                self._mover.fetch_now(saved)
            else:
                saved.holds(self._follow(saved))
            storage = saved.storage
            if self.watch is not None:
                self.watch.follow(saved)
        self._places[storage._cdata] = weakref.ref(saved)
        if self._on_demand(saved) and saved.restorable:
            self._mover.empty(saved)
        return storage

    def _drop(self, saved: Saved, tensor: Tensor, course: Course) -> None:
        """Give up a storage that is made again, if this step knows how."""
        recipe = read(tensor, self._mine)
        planned = course.recording.remakes[saved.number].sources
        if recipe is None or any(one.number not in planned for one in recipe.sources()):
            self._abandon_course()
            return
        recipe.hold()
        if self._prints is None:
            self._prints = Fingerprints(len(course.dropped), self._device)
        saved.mark = self._prints.take(tensor.untyped_storage())
        saved.recipe = recipe
        self._mover.empty(saved)

    def _make(self, number: int) -> None:
        """Make a storage again, and keep it."""
        saved = self._saved[number]()
        if saved is not None:
            storage = saved.here()
            saved.holds(self._follow(saved) if storage is None else storage)
            saved.recipe = None

    def _follow(self, saved: Saved) -> Any:
        """Return the storage that a recipe recomputes."""
        if self._failed:
            raise gone()
        self.remade += saved.size
        storage = saved.recipe.storage(self._present)
        assert self._prints is not None
        assert saved.mark is not None
        self._prints.compare(storage, saved.mark)
        # A device is waited for once, at the end of the step.
        if (self._over or of(self._device).host) and self._prints.differ():
            raise _other(f"one of {saved.size} bytes")
        return storage

    def _present(self, source: Saved) -> Any:
        """Return a source storage of a recipe; if it is not resident, fetch or recompute it."""
        self._mover.arrived(source)
        storage = source.here()
        if storage is None:
            has = source.recipe is not None
            storage = self._follow(source) if has else self._mover.fetch(source)
        return storage

    def _try(self, saved: Saved, watch: StepRecorder) -> None:
        """Check whether the recipe of an offloaded storage reproduces it bit for bit."""
        recipe = self._recipes.pop(saved.number, None)
        if recipe is None or saved.here() is not None or not recipe.good():
            return
        sources = recipe.sources()
        offloaded = sum(source.size for source in sources if source.here() is None)
        if not watch.permits(offloaded + max(recipe.most(), 2 * saved.size)):
            return
        with watch.excluded():
            found = {source.number: self._present(source) for source in sources}
            with watch.excluded() as work:
                start = self._mover.now()
                try:
                    storage = recipe.storage(lambda source: found[source.number])
                    for _ in range(2):  # of what is dropped, and of what is made
                        fingerprint(storage)
                except Exception:  # not with tensors such as these
                    storage = None
                seconds = self._mover.now() - start
            found.clear()
            if storage is not None and same(storage, self._mover.fetch(saved)):
                size = max(0, work.most - work.before - saved.size)
                watch.cheap(saved.number, Remake(tuple(s.number for s in sources), seconds, size))
            del storage

    def _mine(self, saved: Saved) -> bool:
        """Say whether a storage is one of this step."""
        return saved.number < len(self._saved) and self._saved[saved.number]() is saved

    def _on_demand(self, saved: Saved) -> bool:
        """Return whether a storage is evicted at once and fetched on request."""
        course = self.course
        return course is None or course.stages is None or saved.number in course.recording.loose

    def _abandon_course(self) -> None:
        """Drop the course of the step, and evict all resident storages."""
        self.course, self.missed = None, True
        for saved in self._living():
            if saved.storage is not None:
                self._mover.arrived(saved)
                self._mover.send_now(saved)

    def _living(self) -> list[Saved]:
        return [saved for ref in self._saved if (saved := ref()) is not None]


def _other(which: str) -> NotReproducibleError:
    return NotReproducibleError(
        "a saved tensor that is computed again must be what forward saved, and "
        f"{which} is not: something has written to it, to a parameter or to a buffer where "
        "autograd does not see it (detach(), .data), or a kernel rounds otherwise. The gradients "
        "of this step are wrong: zero them. The next steps compute nothing again; recompute=False "
        "leaves that out from the first one"
    )


def _require_counted() -> None:
    """Refuse a node that needs a saved tensor with uncounted writes, in a step without a watch."""
    node: Any = torch._C._current_autograd_node()
    if node is not None and name_of(node).startswith("RreluWithNoise") and node._saved_training:
        raise uncounted("aten.rrelu_with_noise")


# Micro-batches in sequence, each with saved tensors offloaded as far as its budget requires.
#
# `anybatch.offload` has one step and a budget for all bytes. Here the ledger has counted the other
# bytes, so a micro-batch has a limit for its own; and there are several signatures of them: the
# first finds no sums of gradients, the last may be smaller.
#
#     mu_0  recorded      mu_1  recorded      mu_2, mu_3 ...  planned      mu_k smaller: recorded
#     next step: all of them planned
#
# One that differs from the recording offloads everything, which is right for any, and the next of
# its signature is recorded again.


class Keeping:
    """Runs micro-batches within their limits.

    Args:
        make: returns a store.
        device: whose tensors are offloaded.

    Attributes:
        capacity: bytes that the first micro-batch of a step may make, and any other.
        moved: bytes that were copied out and back since `begin`.
        remade: bytes that were dropped, and recomputed from other saved tensors.
        waited: seconds in which a micro-batch waited for copies.
        recorded: micro-batches that were recorded.
    """

    def __init__(self, make: Callable[[], Store], device: torch.device) -> None:
        self._device, self._mover = device, Mover(make, device)
        self._caches: dict[tuple[bool, int], ScheduleCache] = {}
        self._recomputes = True
        self.begin((0, 0))

    def begin(self, capacity: tuple[int, int]) -> None:
        """Begin a step, and count from nothing."""
        self.capacity, self.waited = capacity, 0.0
        self.moved = self.remade = self.recorded = 0

    def close(self) -> None:
        """Release the file or the host memory that is reused from step to step."""
        self._mover.close()

    def run(self, work: Callable[[], None], size: int, *, first: bool) -> None:
        """Do `work`, forward and backward of `size` samples.

        Raises:
            StoreError: there is no space in the store, or a write or a read has failed.
            Retry: a saved tensor was computed again, and is another one.
        """
        cache = self._caches.setdefault((first, size), ScheduleCache())
        limit = self.capacity[0 if first else 1]
        tries = limit if self._recomputes else 0
        watch = StepRecorder(self._device, tries, None) if cache.to_record else None
        found = {} if watch else {cut: one.course(limit) for cut, one in cache.recorded.items()}
        courses = {cut: course for cut, course in found.items() if course is not None}
        mover = self._mover
        mover.reset()
        step = StepHooks(mover, self._device, watch, courses)
        changed = False
        try:
            with step:
                mover.ready()
                work()
        except NotReproducibleError:
            changed = step.remade > 0
            if not changed:
                raise
        if changed:  # out of the handler, which holds the frames of the error
            self._recomputes = False
            self._caches.clear()
            raise Retry("recompute")
        self.moved += mover.moved
        self.remade += step.remade
        self.waited += mover.waited
        if watch is not None:
            self.recorded += 1
            cache.learn(Recorded(without_outside(watch), link_of(mover)))
        elif step.missed and courses:
            cache.missed()


def without_outside(watch: StepRecorder) -> Recording:
    """Return the recording of a micro-batch without the bytes that were resident before it."""
    recording = watch.recording()
    return replace(recording, outside=0, peak=recording.peak - recording.outside)
