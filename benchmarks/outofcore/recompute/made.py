"""A step as it was recorded, in which what is cheap is made again and nothing moves."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

import torch

from anybatch.core.plan_sections import Link
from anybatch.memory.stores import FileStore
from anybatch.offloading.course import Course, Recording, Remake, choices, remade, set_course
from anybatch.offloading.mover import Mover
from anybatch.offloading.recorder import StepRecorder
from anybatch.offloading.saved_tensors import StepHooks as Hooks
from benchmarks.outofcore.offload.steps import LOTS, Step

SLOW = Link(1.0, 1.0)
"""Whatever can be made again is faster than a byte a second."""


def recorded(step: Step) -> Recording:
    """Return the recording of a step, in which every recipe was tried."""
    watch = StepRecorder(step.device, LOTS)
    with Again(step.device, watch), watch:
        step.run(ExitStack())
    return watch.recording()


def made_again(recording: Recording, goal: float) -> Course:
    """Return the course that makes again what is cheap, the cheapest first, and moves nothing.

    Args:
        recording: the step.
        goal: share of the saved bytes that may be kept; what is cheap beyond it is kept, too.
    """
    sizes, remakes = recording.sizes, recording.remakes
    order = sorted(
        list(choices(recording, SLOW))[-1], key=lambda k: (remakes[k].seconds / sizes[k], k)
    )
    left, chosen = sum(sizes), dict[int, Remake]()
    for k in order:
        if left > goal * sum(sizes):
            chosen[k] = remakes[k]
            left -= sizes[k]
    memory = recording.outside + remade(recording, chosen).trace.peak
    return set_course(replace(recording, remakes=chosen), memory, SLOW)


class Again:
    """Stands around a step that follows a course, or is recorded.

    Attributes:
        remade: bytes that the last step has made again.
    """

    def __init__(
        self, device: torch.device, watch: StepRecorder | None = None, course: Course | None = None
    ) -> None:
        self.remade = 0
        self._device, self._watch = device, watch
        self._courses = {} if course is None else {course.recording.cuts[0]: course}

    def __enter__(self) -> Self:
        self._mover = Mover(FileStore, self._device)
        self._hooks = Hooks(self._mover, self._device, self._watch, self._courses)
        pair = self._hooks.pack, self._hooks.unpack
        self._around = torch.autograd.graph.saved_tensors_hooks(*pair)
        self._around.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._around.__exit__(*error)
        self._mover.close()
        self._hooks.end()
        assert self._watch is not None or not self._hooks.missed
        self.remade = self._hooks.remade
