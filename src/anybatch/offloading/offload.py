"""`anybatch.offload`: a user's own forward and backward within a byte budget.

    with off:   step 1   recorded: all that autograd saves leaves at once, and every byte is counted
    with off:   step 2   planned: what must leave does, and returns before it is asked for
    with off:   step 3   ...

The hooks are `anybatch.offloading.saved_tensors`, the plan `anybatch.offloading.policy`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from types import TracebackType
from typing import Self

import torch

from anybatch.core import accelerator
from anybatch.core.accelerators import default_device
from anybatch.core.units import parse_bytes
from anybatch.errors import NotReproducibleError
from anybatch.memory.ledger import StepTimeline
from anybatch.memory.spill import maker
from anybatch.memory.stores import Store
from anybatch.offloading.course import Course, Cut, too_little
from anybatch.offloading.mover import Mover
from anybatch.offloading.recorder import Recorded, ScheduleCache, StepRecorder, link_of
from anybatch.offloading.saved_tensors import StepHooks
from anybatch.offloading.unroll import of_course


@dataclass(frozen=True)
class OffloadReport:
    """Report of one step under `offload`.

    Attributes:
        mode: "recorded", "planned", or "on demand": the step was like no recorded one, or fits only
            with everything offloaded.
        predicted_bytes: forecast of the peak; of a recorded step, its peak. None where there is no
            forecast for such a step.
        out_bytes: bytes that were offloaded.
        back_bytes: bytes that were copied back.
        waited: seconds in which the step waited for copies.
        remade_bytes: bytes that were dropped, and recomputed from other saved tensors.
    """

    mode: str
    predicted_bytes: int | None
    out_bytes: int
    back_bytes: int
    waited: float
    remade_bytes: int = 0


class Offload:
    """Context manager that `offload` returns: enter it around every step.

    Args:
        memory: bytes of the budget.
        make: returns a store.
        device: device of the tensors that are offloaded.
        recompute: results may be recomputed.

    Attributes:
        memory: bytes of the budget.
        last: report of the last step; None before the first has ended.
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
        self._cache = ScheduleCache()
        self._followed: Course | None = None
        self._newest: Recorded | None = None
        self._there = self._scratch = self._most = 0
        self._inside: StepHooks | None = None

    def __enter__(self) -> Self:
        if self._inside is not None:
            raise RuntimeError(
                "a step must end before the next begins, and this offload() is entered already: "
                "make another for a step inside a step"
            )
        self._mover.reset()
        self._there, self._most = allocated(self._device), most_allocated(self._device)
        courses = self._courses()
        watch = (
            StepRecorder(self._device, self._tries, self._there) if self._cache.to_record else None
        )
        self._mover.require_space(max((course.sent for course in courses.values()), default=0))
        step = StepHooks(self._mover, self._device, watch, courses)
        try:
            self._inside = step
            step.__enter__()
        except BaseException:  # an interrupt, maybe after the hooks were entered
            step.give_up()
            self._inside = None
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        step = self._inside
        assert step is not None
        watch, course = step.watch, step.course
        try:
            step.__exit__(exc_type, value, trace)
        except BaseException as error:  # an interrupt, most likely before it was held back
            step.give_up()
            self._stop_recomputing(error)
            raise
        finally:
            self._inside = None
        if exc_type is None:
            self._learn(step, watch, course)
        else:
            self._stop_recomputing(value)

    def _stop_recomputing(self, error: BaseException | None) -> None:
        """Have later steps compute nothing again, after one in which that was something else."""
        if isinstance(error, NotReproducibleError):
            self._tries, self._cache = 0, ScheduleCache()

    def timeline(self) -> StepTimeline:
        """Return the timeline of the last planned step: bytes by owner, and copies, over time.

        It has each storage that is offloaded, and the times in which kernels and both directions of
        the link are busy: as planned, from the seconds of the recorded step and the measured speed
        of copies. After a recorded step it is the plan for the next step like it.

        Returns:
            The timeline; it prints as a chart, and its peak is the forecast of the plan.

        Raises:
            RuntimeError: no step has been recorded yet.

        Example:
            >>> with off:
            ...     loss_fn(model(x), y).backward()
            >>> print(off.timeline())
        """
        newest, followed = self._newest, self._followed
        course = followed if newest is None else newest.course(self.memory)
        if course is None:
            raise RuntimeError(
                "a step must have been recorded before it has a timeline, and none has been: run "
                "one inside this offload()"
            )
        return of_course(course)

    def close(self) -> None:
        """Release the file or the host memory that is reused from step to step."""
        self._mover.close()

    def _courses(self) -> dict[Cut, Course]:
        """Return the courses of the recorded steps, or none so that this step is recorded.

        More may be there than at the recording (gradients), which count at unknown times.
        """
        cache, found = self._cache, dict[Cut, Course]()
        for cut, one in () if cache.to_record else cache.recorded.items():
            course = one.course(self.memory - self._scratch, one.more(self._there))
            if course is None:
                cache.to_record = 1
                return {}
            found[cut] = course
        return found

    def _learn(self, step: StepHooks, watch: StepRecorder | None, course: Course | None) -> None:
        """Take in a step that has gone well."""
        mover = self._mover
        out, back = mover.bytes
        moved = out, back, mover.waited, step.remade
        if watch is None:
            planned = course is not None and course.stages is not None and not step.missed
            predicted = None
            if course is not None and not step.missed:
                predicted = course.predicted + self._scratch
                self._followed, self._newest = course, None
                # Memory of a kernel of its own, which no recording has. Where an earlier step had
                # more, the allocator's statistic is of that one.
                now = most_allocated(self._device)
                if now > self._most:
                    self._scratch = max(self._scratch, now - course.predicted)
            self.last = OffloadReport("planned" if planned else "on demand", predicted, *moved)
            if step.missed:
                self._cache.missed()
            return
        recording = watch.recording(self._there)
        most = max(recording.peak, watch.tried + recording.outside)
        self.last = OffloadReport("recorded", most, *moved)
        if recording.peak > self.memory:
            raise too_little(recording.peak, self.memory)
        one = Recorded(recording, link_of(mover), watch, self._there)
        self._cache.learn(one)
        if recording.cuts:
            self._newest = one


def offload(
    *,
    memory: float | str,
    store: str | PathLike[str] | None = None,
    device: torch.device | str | None = None,
    check: bool = False,
    recompute: bool = True,
) -> Offload:
    """Keep your own forward and backward within a byte budget by offloading saved tensors.

    Saved tensors are those that autograd saves in forward for backward. The first step under one
    `offload` is recorded. Later steps offload as many saved tensors as the budget requires, the
    ones needed last first, and prefetch each before its use. A saved tensor that can be recomputed
    from others (normalisation, activations, products, convolutions, attention) may be dropped
    instead, where the plan finds that faster: as checkpoints do, but for draws, which are not
    repeated. Gradients are bit for bit those without it. Weights, buffers, inputs and all
    other tensors from before the step are resident.

    Args:
        memory: the most bytes that a step may hold, such as "4GiB": the tensors that it makes, and
            earlier ones that it uses (parameters, buffers, inputs, gradients); on CUDA all that
            the process has allocated. The first step is recorded with everything offloaded.
        store: place of offloaded tensors: "host" memory (pinned), a "file" in the system's folder
            for temporary files, or a folder for that file. Default None: "host" from CUDA, "file"
            on the CPU. The file has no name, and disappears with the process.
        device: device of the tensors. Default None: CUDA if there is one, else the CPU.
        check: for debugging, store a checksum of every offloaded block, and compare it when the
            block returns. Default False: changes by a disk or another program are not detected.
        recompute: results may be recomputed, but only those for which a trial in the recorded step
            was equal bit for bit. Default True.

    Returns:
        A context manager to enter around forward and backward of every step, one at a time.

    Raises:
        ValueError: `memory` or `store` is not valid here.
        BudgetError: at the end of a recorded step: with everything offloaded it held more than
            `memory`. Its gradients are right.
        StoreError: in a step, or on entering it: the store is full, a write or a read has failed,
            or a block returned with another checksum (`check`).
        NotReproducibleError: in a step: a tensor was recomputed, and is another one than forward
            saved, because something was written where autograd does not see it.

    Example:
        >>> off = anybatch.offload(memory="4GiB")
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     with off:
        ...         loss_fn(model(x), y).backward()
        ...     optimizer.step()

    Source: Hayakawa and Narihira, Out-of-core training, section 3.
    """
    where = torch.device(device) if device is not None else default_device()
    make = maker(store, where, check=check)
    return Offload(parse_bytes(memory), make, where, recompute=recompute)


def allocated(device: torch.device) -> int:
    """Return the bytes that the process has allocated on a GPU; 0 for the CPU."""
    return accelerator.of(device).allocated(device)


def most_allocated(device: torch.device) -> int:
    """Return the most that it has had so far, where the allocator tells; else 0."""
    there = accelerator.of(device)
    return there.peak(device) if there.peaks else 0
