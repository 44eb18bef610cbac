"""Measurement of steps, and lessons of the planner from it.

The first step after a decision runs under the meter, or under the allocator's own statistic where a
device has one. Later ones do not: the meter costs up to three times the time of small kernels. The
next few and some later ones are watched: by that statistic, or by the bytes of the C library's
allocator at the start of backward. All are watched if their bytes may depend on values of a batch.
The next steps are metered again after a watched one with more bytes than a metered step had, where
the model has changed since its inspection, and where a step computes more at once. While they can
be retried smaller, they are stopped at the budget.

    step 1 metered ──> 2, 3, ... 17, 33 watched ──more──> metered again ──> planned again
                               └── another model ───────────┘
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from math import inf
from typing import Any, NamedTuple

from torch import Tensor

from anybatch.core import accelerator
from anybatch.core.modules import Modules, eager, tensors_of
from anybatch.core.oom import out_of_memory
from anybatch.core.optimizers import rounding, state_bytes, state_tensors
from anybatch.core.plan import bar, card, table
from anybatch.core.retry import Retry
from anybatch.core.transaction import Before
from anybatch.core.units import show_bytes
from anybatch.engine.executor import Runner
from anybatch.engine.inputs import StepInputs
from anybatch.execution.signature import Signature
from anybatch.execution.step import Step
from anybatch.memory.fakes import paged, uncounted
from anybatch.memory.meter import FOREIGN, Meter, live_peak, read_peak
from anybatch.planner.planner import Planner

MORE = 0.05
"""Share of a metered step's bytes that a watched one may hold more, if the budget has them."""

LEAST = 262144
"""Bytes in addition: Python's own objects, and those of its threads, are in what the C library has
allocated."""

EVERY = 16
"""Steps after a metered one that are watched, and of later ones every so many: the C library takes
long to tell in a heap in many pieces."""

NEXT = 4
"""Steps that are metered again: two models may take turns."""


@dataclass
class _Metered:
    """Steps that were metered, and those that will be.

    Attributes:
        held: elements that are computed at once -> the most bytes where backward begins.
        heap: the same of all that the C library allocates, until such a step is watched.
        next: steps that are metered again.
        sure: elements up to which a step need not be.
    """

    held: dict[int, int] = field(default_factory=dict)
    heap: dict[int, int] = field(default_factory=dict)
    next: int = 0
    sure: float = inf

    def add(self, elements: int, held: int, heap: int) -> None:
        """Record a metered step."""
        self.held[elements] = max(self.held.get(elements, 0), held)
        self.heap[elements] = heap
        self.next, self.sure = max(0, self.next - 1), max(self.sure, elements)
        if not self.next and self.sure >= max(self.held):  # the alarm was about nothing
            self.sure = inf

    def expected(self, elements: int, *, heap: bool = False) -> float:
        """Return the bytes of metered steps with so many elements at once, or more."""
        counts = self.heap if heap else self.held
        larger = [one for one in counts if one >= elements]
        most = min(larger, default=max(counts, default=1))
        held = counts.get(most, 0)
        return held if larger else held * elements / most


class CountedBytes(NamedTuple):
    """Functions that return the most bytes, and those live now; 0 where a device counts them."""

    peak: Callable[[], int]
    live: Callable[[], int]


@contextmanager
def measured(
    inputs: StepInputs,
    modules: Modules,
    before: Before,
    limit: int | None = None,
    stops: Callable[[], bool] = lambda: True,
) -> Iterator[CountedBytes]:
    """Count the peak bytes of the body, with the tensors that were live before it.

    Its allocator's peak, if the device records one; else the body runs under the meter, and may
    end, where it `stops`, with torch.OutOfMemoryError if it holds more than `limit` bytes.
    """
    device, optimizer = inputs.device, inputs.optimizer
    if accelerator.of(device).peaks:
        with live_peak(device, {}) as peak:
            yield CountedBytes(peak, lambda: 0)
        return
    every = [module for _, module in modules]
    pages = paged()
    there = [*tensors_of(every, "_parameters"), *inputs.shards]
    gradients = [gradient for _, gradient in before.gradients if gradient is not None]
    owned = {
        FOREIGN: [t for t in (*there, *gradients) if pages.holds(t)],
        "parameters": there,
        "buffers": [
            *tensors_of(every, "_buffers"),
            *(b.values for b in before.buffers if b.values is not None),
        ],
        "optimizer": [] if optimizer is None else state_tensors(optimizer),
        "gradients": gradients,
    }
    leaves = [leaf for leaf, _ in before.gradients]
    with (
        eager(),
        Meter(device, owned, limit=limit, stops=stops) as meter,
        uncounted(meter, leaves, pages.ids(leaves)),
    ):
        yield CountedBytes(lambda: int(meter.peak) + pages.most, lambda: meter.live)


# The bytes that the C library has handed out: a meter costs up to three times the time of small
# kernels, and this little, more in a heap in many pieces. It counts all of
# the process, so it shows that something has changed, and a meter how much.

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Info(ctypes.Structure):
    """Statistic of glibc's allocator, in bytes and blocks."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


@cache
def _mallinfo() -> Callable[[], _Info] | None:
    """Return the function that tells it; None where the C library has none."""
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    found.restype = _Info
    return found


def in_use() -> int:
    """Return the bytes that are allocated now; 0 where the C library does not tell.

    Source: glibc, mallinfo2(3): blocks of the heap in use, and blocks that were mapped.
    """
    tell = _mallinfo()
    if tell is None:
        return 0
    info = tell()
    return int(info.uordblks + info.hblkhd)


class LiveBytes:
    """Record of the most bytes that are live, by `now()`, beyond those at its start."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now, self._start, self.most = now, now(), 0

    def begin(self) -> None:
        """Begin anew, at the bytes of this moment."""
        self._start, self.most = self._now(), 0

    def __call__(self) -> None:
        """Compare the bytes of this moment."""
        self.most = max(self.most, self._now() - self._start)

    def paired(self, other: LiveBytes) -> Callable[[], None]:
        """Return a function that has both compare the bytes of its moment."""

        def both() -> None:
            self()
            other()

        return both


class Measurement:
    """Measurement of the steps of an engine."""

    def __init__(self, inputs: StepInputs, runner: Runner) -> None:
        self._inputs, self._runner = inputs, runner
        self._measured = self._since = 0
        # Of training and of evaluation, which holds less and says nothing of the other
        # (test_evaluation_says_nothing_of_a_model_that_has_grown).
        self._metered_steps = {True: _Metered(), False: _Metered()}

    def run(
        self,
        planner: Planner | None,
        step: Step,
        signature: Signature | None,
        modules: Modules,
        before: Before,
    ) -> tuple[Tensor, int | None]:
        """Run an attempt of a step, and return its loss and its most bytes; None if unknown.

        Without a planner there is no `signature`. `before` is the state before the step.

        Raises:
            Retry: it has failed by its planned size, and is run again in another.
        """
        if planner is None or signature is None:
            peak = read_peak(step.device)
            return self._runner.run(step, modules, before), peak()
        first, trial = planner.decided != self._measured, planner.trial(signature)
        earlier = self._metered_steps[signature.trains]
        if step.attempts.other_model:
            earlier.next, earlier.sure = NEXT, 0
        again = earlier.next > 0 or _elements(step, signature) > earlier.sure
        step.clocked = trial and not first and not again
        try:
            if first or again:
                return self._metered(planner, step, signature, modules, before, again=again)
            self._since += 1
            if planner.varies(signature) or self._since <= EVERY or self._since % EVERY == 1:
                return self._watched(planner, step, signature, modules, before)
            read = read_peak(step.device)
            return self._runner.run(step, modules, before), read()
        except Exception as error:
            other = isinstance(error, Retry) or out_of_memory(error)
            may = step.unseen() and not step.global_batch.several and not other
            if not (may and planner.gives_up(signature, error)):
                raise
        raise Retry("size")  # out of the handler, which holds the frames of the error

    def _metered(
        self,
        planner: Planner,
        step: Step,
        signature: Signature,
        modules: Modules,
        before: Before,
        *,
        again: bool,
    ) -> tuple[Tensor, int]:
        """Run it under the meter, where the device has no statistic; `again` for another model."""
        inputs = self._inputs
        limit = planner.limit(signature, state_bytes(inputs.optimizer), again=again)
        with measured(inputs, modules, before, limit, step.may_stop) as found:
            live, heap = LiveBytes(found.live), LiveBytes(in_use)
            step.begin, step.sample = heap.begin, heap.paired(live)
            loss = self._runner.run(step, modules, before)
        self._measured = planner.decided
        self._since = 0
        self._metered_steps[signature.trains].add(_elements(step, signature), live.most, heap.most)
        grain = rounding(inputs.device)
        later = grain if grain > 1 else 0  # the loss that `last` has while the next step runs
        peak = found.peak()
        states, stopped = state_bytes(inputs.optimizer), step.retries > 0
        inspected = not step.attempts.other_model
        measured_peak = signature, peak + later, states, step.limit
        if planner.learn(*measured_peak, again=again, stopped=stopped, inspected=inspected):
            self._metered_steps = {True: _Metered(), False: _Metered()}  # of another model
        return loss, peak

    def _watched(
        self, planner: Planner, step: Step, signature: Signature, modules: Modules, before: Before
    ) -> tuple[Tensor, int | None]:
        """Run it, and have the next one metered again if it has held more than a metered one."""
        live = LiveBytes(in_use)
        step.begin, step.sample = live.begin, live
        read = read_peak(step.device)
        loss = self._runner.run(step, modules, before)
        peak = read()
        if accelerator.of(step.device).peaks:
            # None: its statistic shows an earlier one, which was more.
            if peak is not None and planner.varies(signature):
                planner.learn(signature, peak, state_bytes(self._inputs.optimizer), step.limit)
            return loss, peak
        elements, earlier = _elements(step, signature), self._metered_steps[signature.trains]
        expected = earlier.expected(elements)
        more = LEAST + min(MORE * expected, planner.left(signature))
        if live.most - expected > more:
            # What the C library has in addition, in steps that hold no more, is no alarm again.
            earlier.held[elements] = live.most
            # Autograd's nodes, stores and threads were there in the metered step, too
            # (test_a_long_graph_is_no_alarm).
            if live.most - earlier.expected(elements, heap=True) > more:
                # A search ends late where steps are metered, which have no seconds.
                earlier.next, earlier.sure = 1 if step.clocked else NEXT, 0
        earlier.heap.pop(elements, 0)  # the meter and an inspection allocated in that step alone
        return loss, peak


def _elements(step: Step, signature: Signature) -> int:
    """Return the elements of the batch that are computed at once."""
    return max(1, signature.elements * step.limit)


# Report of a step.


@dataclass(frozen=True)
class StepReport:
    """Report of the last step: loss, sizes, time, peak and retries.

    Attributes:
        loss: loss of the full batch, a detached 0-dim tensor.
        samples: N_B, over all ranks.
        micro_batch: N_mu, samples in a micro-batch; after a retry, the last size.
        micro_batches: N_S, micro-batches of this rank.
        seconds: host time of the call; on CUDA the device may still be computing.
        peak_bytes: the most bytes held. On CUDA the peak of the allocator, or None where that is
            an earlier step's; on the CPU live bytes of tensors, measured in the first step
            after each forecast, else None.
        predicted_bytes: the forecast of the plan; None where there is no budget to plan with.
        moved_bytes: bytes of offloaded tensors that were copied out of the device and back.
        remade_bytes: bytes that were recomputed from other saved tensors instead.
        retries: times that memory ran out, and a micro-batch or the step was retried, smaller.
        batchnorm: "exact" or "local".
    """

    loss: Tensor
    samples: int
    micro_batch: int
    micro_batches: int
    seconds: float
    peak_bytes: int | None
    predicted_bytes: int | None = None
    moved_bytes: int = 0
    remade_bytes: int = 0
    retries: int = 0
    batchnorm: str = "exact"

    def keys(self) -> list[str]:
        """Return the names of its numbers, so that ``dict(engine.last)`` holds them."""
        return [one.name for one in fields(self) if isinstance(self[one.name], int | float)]

    def __getitem__(self, name: str) -> Any:
        """Return one of its values; of the loss the number, for which a device is waited for.

        Args:
            name: of an attribute.

        Example:
            >>> wandb.log({**engine.last})
        """
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        value = getattr(self, name)
        return float(value) if isinstance(value, Tensor) else value

    def _repr_html_(self) -> str:
        """Return the notebook view: the measured peak next to the forecast, and the step."""
        held, foreseen = self.peak_bytes, self.predicted_bytes
        named = {
            "loss": f"{float(self.loss):.6g}",
            "samples": f"{self.samples} in {self.micro_batches} micro-batches of up to "
            f"{self.micro_batch}",
            "seconds": f"{self.seconds:.3g}",
        }
        optional = {
            "peak": None if held is None else show_bytes(held),
            "predicted": None if foreseen is None else show_bytes(foreseen),
            "moved": show_bytes(self.moved_bytes) if self.moved_bytes else None,
            "computed again": show_bytes(self.remade_bytes) if self.remade_bytes else None,
            "retries": str(self.retries) if self.retries else None,
        }
        named |= {name: value for name, value in optional.items() if value is not None}
        measured = held is not None and foreseen is not None
        return card(
            "last step",
            bar((("held", held),), foreseen) if measured and held and foreseen else "",
            table({**named, "batchnorm": self.batchnorm}),
        )
