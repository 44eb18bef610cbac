"""`anybatch.offload`: a person's own forward and backward within a byte budget.

    with off:   step 1   recorded: all that autograd saves leaves at once, and every byte is counted
    with off:   step 2   planned: what must leave does, and returns before it is asked for
    with off:   step 3   ...

The hooks are `anybatch.outofcore.execute`, the plan `anybatch.outofcore.best`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from anybatch.errors import BudgetError
from anybatch.outofcore.course import Course, set_course, too_little
from anybatch.outofcore.execute import Step
from anybatch.outofcore.mover import Mover
from anybatch.outofcore.recording import Cut, Recording
from anybatch.outofcore.simulate import Link
from anybatch.outofcore.unroll import of_course
from anybatch.outofcore.watch import Watch, gradient_bytes
from anybatch.step_timeline import StepTimeline
from anybatch.stores import FileStore, HostStore, Store
from anybatch.undo import uninterrupted
from anybatch.units import parse_bytes

FAST = 1e12
"""Bytes a second of a link that nothing has gone over."""

MOST = 8
"""Steps that are recorded in a row, at most, while shapes change."""


KEPT = 16
"""Recorded steps that are known at a time."""


@dataclass(frozen=True)
class OffloadReport:
    """What one step under `offload` has done.

    Attributes:
        kind: "recorded", "planned", or "on demand" where it was like none that was recorded, or
            fits only with everything away.
        predicted_bytes: the most bytes it was to hold; of a recorded step, those it held. None
            where nothing is known of such a step.
        out_bytes: bytes that have left.
        back_bytes: bytes that have returned.
        waited: seconds in which the step waited for copies.
        remade_bytes: bytes that were dropped, and computed again from what was saved beside them.
    """

    kind: str
    predicted_bytes: int | None
    out_bytes: int
    back_bytes: int
    waited: float
    remade_bytes: int = 0


class Offload:
    """What `offload` returns: enter it around every step.

    Args:
        memory: bytes of the budget.
        make: returns a store.
        device: whose tensors leave.
        recompute: cheap results may be computed again.

    Attributes:
        memory: bytes of the budget.
        last: what the last step has done; None before the first has ended.
    """

    def __init__(
        self,
        memory: int,
        make: Callable[[], Store],
        device: torch.device,
        *,
        recompute: bool = True,
    ) -> None:
        self.memory = memory
        self._tries = memory if recompute else 0
        self.last: OffloadReport | None = None
        self._device, self._mover = device, Mover(make, device)
        self._recordings: dict[Cut, _Known] = {}
        self._followed: Course | None = None
        self._newest: _Known | None = None
        self._to_record, self._misses = 1, 0
        self._there = 0
        self._step: Step | None = None
        self._watch: Watch | None = None
        self._hooks: Any = None

    def __enter__(self) -> Self:
        if self._step is not None:
            raise RuntimeError(
                "a step must end before the next begins, and this offload() is entered already: "
                "make another for a step inside a step"
            )
        self._mover.begin()
        self._there = allocated(self._device)
        courses = {} if self._to_record else self._courses()
        watch = Watch(self._device, self._tries, self._there) if self._to_record else None
        self._mover.require_room(max((course.sent for course in courses.values()), default=0))
        step = Step(self._mover, self._device, watch, courses)
        hooks = torch.autograd.graph.saved_tensors_hooks(step.pack, step.unpack)
        try:
            with uninterrupted():
                hooks.__enter__()
                if watch is not None:
                    watch.__enter__()  # type: ignore[no-untyped-call]
                self._step, self._watch, self._hooks = step, watch, hooks
        except BaseException as error:
            if self._step is not None:  # an interrupt that was held back
                self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        step, watch = self._step, self._watch
        assert step is not None
        try:
            with uninterrupted(once=True):
                course = self._leave(failed=kind is not None)
        except BaseException:
            if self._step is not None:  # an interrupt that was not held back yet
                self._leave(failed=True)
            raise
        if kind is None:
            self._learn(step, watch, course)

    def timeline(self) -> StepTimeline:
        """Return the last planned step as it passes: who holds how many bytes when, and what moves.

        Each storage that leaves and returns, and when kernels and both ways of the link are busy:
        as planned, from the seconds of the recorded step and the speed at which storages have
        moved. After a recorded step it is the plan for the next one like it.

        Returns:
            The step; it prints as a chart, and its peak is what the plan predicts.

        Raises:
            RuntimeError: no step has been recorded yet.

        Example:
            >>> with off:
            ...     loss_fn(model(x), y).backward()
            >>> print(off.timeline())
        """
        newest, followed = self._newest, self._followed
        course = followed if newest is None else newest.beside(self.memory, 0)
        if course is None:
            raise RuntimeError(
                "a step must have been recorded before its timeline can be told, and none has "
                "been: run one inside this offload()"
            )
        return of_course(course)

    def close(self) -> None:
        """Give up the file or the host memory that is kept from step to step."""
        self._mover.close()

    def _courses(self) -> dict[Cut, Course]:
        """Return what the recorded steps do now, or have this one recorded.

        More may be there than when they were (gradients), of which it is not known when it counts.
        """
        try:
            known = self._recordings.items()
            return {cut: one.course(self.memory, self._there) for cut, one in known}
        except BudgetError:
            self._to_record = 1
            return {}

    def _leave(self, *, failed: bool) -> Course | None:
        """End a step, and return the course that it followed to the end."""
        step, watch, hooks = self._step, self._watch, self._hooks
        self._step = self._watch = self._hooks = None
        assert step is not None
        try:
            if watch is not None:
                watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        finally:
            hooks.__exit__(None, None, None)
            course = self._ended(step, failed=failed)
        return course

    def _ended(self, step: Step, *, failed: bool) -> Course | None:
        """End the threads, and after a failed step give up all that has left; return its course."""
        course = step.course
        try:
            if not failed:
                self._mover.rest()
                step.end()
                return course
        except BaseException:
            failed = True
            raise
        finally:
            if failed:
                step.fail()
                self._mover.close()
        return None

    def _learn(self, step: Step, watch: Watch | None, course: Course | None) -> None:
        """Take in a step that has gone well."""
        mover = self._mover
        moved = mover.out, mover.back, mover.waited, step.remade
        if watch is None:
            planned = course is not None and course.stages is not None and not step.missed
            predicted = None if course is None or step.missed else course.predicted
            if predicted is not None:
                self._followed, self._newest = course, None
            self.last = OffloadReport("planned" if planned else "on demand", predicted, *moved)
            if step.missed:
                self._misses += 1
                self._to_record = min(self._misses, MOST)
            return
        recording = watch.recording(self._there)
        most = max(recording.peak, watch.tried + recording.outside)
        self.last = OffloadReport("recorded", most, *moved)
        if recording.peak > self.memory:
            raise too_little(recording.peak, self.memory)
        self._to_record -= 1
        if recording.cuts:
            if len(self._recordings) == KEPT:
                del self._recordings[next(iter(self._recordings))]
            self._newest = _Known(recording, mover, watch, self._there)
            self._recordings[recording.cuts[0]] = self._newest


class _Known:
    """A recorded step, and the courses that were set for it."""

    def __init__(self, recording: Recording, mover: Mover, watch: Watch, there: int) -> None:
        self._recording, self._leaves = recording, watch.leaves
        self._then = there or watch.gradients
        rates = [size / spent if spent else FAST for size, spent in mover.rates]
        self._link = Link(out=rates[0], back=rates[1])
        self._courses: dict[int, Course] = {}

    def course(self, memory: int, there: int) -> Course:
        """Return the course beside what is there now: on the CPU gradients, on CUDA anything."""
        leaves = (leaf for ref in self._leaves.values() if (leaf := ref()) is not None)
        return self.beside(memory, max(0, (there or sum(map(gradient_bytes, leaves))) - self._then))

    def beside(self, memory: int, more: int) -> Course:
        """Return the course beside `more` bytes than were there when the step was recorded."""
        if more not in self._courses:
            self._courses[more] = set_course(self._recording, memory, self._link, more)
        return self._courses[more]


def offload(
    *,
    memory: int | str,
    store: str | PathLike[str] | None = None,
    device: torch.device | str | None = None,
    check: bool = False,
    recompute: bool = True,
) -> Offload:
    """Keep a person's own forward and backward within a byte budget: what is saved leaves.

    Autograd saves tensors in forward for backward, and holds them meanwhile. The first step under
    one `offload` is recorded; from then on as much leaves as the budget asks for, what is asked for
    last first, and returns before it is asked for. What is cheap to compute again from what is
    saved anyway (normalisation, activations, sums) may be dropped instead, where the plan finds
    that faster. Gradients are bit for bit those without it.
    Weights stay, as do buffers, inputs and everything else that was there before the step.

    Args:
        memory: the most bytes that a step may hold, such as "4GiB": what it makes, and what was
            there before and is used in it (parameters, buffers, inputs, gradients); on CUDA all
            that the process has allocated. The first step is recorded with everything away.
        store: where tensors go: "host" memory (pinned), a "file" in the system's folder for
            temporary files, or a folder for that file. Default None: "host" from CUDA, "file" on
            the CPU. The file has no name, and is gone when the process is.
        device: whose tensors leave. Default None: CUDA if there is one, else the CPU.
        check: for debugging, keep a checksum of every block that leaves, and compare it when the
            block returns. Default False: what a disk or another program has changed is not seen.
        recompute: cheap results may be computed again. Only those are that came out bit for bit
            when that was tried, in the recorded step.

    Returns:
        A context manager to enter around forward and backward of every step, one at a time.

    Raises:
        ValueError: `memory` or `store` means nothing here.
        BudgetError: on leaving a recorded step: with everything away it has held more. Its
            gradients are right.
        StoreError: in a step, or on entering it: there is no room, a write or a read has failed,
            or what returns is not what had left (`check`).

    Example:
        >>> off = anybatch.offload(memory="4GiB")
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     with off:
        ...         loss_fn(model(x), y).backward()
        ...     optimizer.step()

    Source: Hayakawa and Narihira, Out-of-core training, section 3.
    """
    where = torch.device(device) if device is not None else _default()
    make = _store(store, where, check=check)
    return Offload(parse_bytes(memory), make, where, recompute=recompute)


def allocated(device: torch.device) -> int:
    """Return the bytes that the process has allocated on a GPU; 0 for the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _default() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _store(
    given: str | PathLike[str] | None, device: torch.device, *, check: bool
) -> Callable[[], Store]:
    """Return what makes the store."""
    host = device.type != "cpu"
    if given is None:
        given = "host" if host else "file"
    if given == "host" and host:
        return partial(HostStore, check=check)
    if given != "host" and not host:
        folder = None if given == "file" else Path(given)
        if folder is None or folder.is_dir():
            return partial(FileStore, folder, direct=True, check=check)
    raise ValueError(
        'store must be "host" from a GPU, and "file" or a folder that is there on the CPU, and it '
        f"is {str(given)!r} on {device.type}: leave it out to have what the device takes"
    )
