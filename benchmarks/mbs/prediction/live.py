"""Live bytes of a step: what is foreseen beside what is measured, for every size and optimizer.

One forecast is made for a model and an optimizer that has not stepped yet, from the largest batch,
as the engine does when that one comes first. It is then asked for every size. The engine runs each
of them by a plan that was given, so nothing that it learns on the way comes back into the forecast.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from anybatch import Engine, Plan
from anybatch.core.batch import TensorBatch
from anybatch.core.optimizers import state_tensors
from anybatch.core.plan_sections import FORESEEN, Memory
from anybatch.engine.inputs import StepInputs
from anybatch.lockstep.sync_batchnorm import Fixed
from anybatch.loss.callable_loss import CallableLoss
from anybatch.memory.meter import Meter
from anybatch.planner.forecast import Forecast
from anybatch.planner.ladder import forecast
from benchmarks.mbs.prediction.models import OPTIMIZERS, SUBJECTS, Subject
from benchmarks.mbs.prediction.referee import allocated_peaks

LOCAL = Fixed("local")
AMPLE = 1 << 40  # bytes: more than anything here needs
PARTS = 3  # micro-batches in a divided batch
REFEREED = 16  # samples of the step that is counted twice
SEED = 0
Cells = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """How a batch is run: samples in a micro-batch and in the batch, and where gradients sum."""

    micro_batch: int
    size: int
    accumulator: bool = False

    @property
    def name(self) -> str:
        """In a word or two."""
        if self.size == self.micro_batch:
            return "undivided"
        return "accumulator" if self.accumulator else "in place"


def ways(undivided: Iterable[int], divided: Iterable[int], accumulated: Iterable[int]) -> list[Way]:
    """Some sizes undivided, some divided with gradients in place, some with an accumulator."""
    found = [Way(n, n) for n in undivided]
    found += [Way(n, PARTS * n) for n in divided]
    return found + [Way(n, PARTS * n, accumulator=True) for n in accumulated]


@dataclass(frozen=True)
class Ready:
    """A subject on its device, and an optimizer that has not stepped yet."""

    subject: Subject
    optimizer: torch.optim.Optimizer
    device: torch.device

    @classmethod
    def of(cls, name: str, optimizer: str, device: str) -> "Ready":
        """The named subject and optimizer."""
        torch.manual_seed(SEED)
        subject = SUBJECTS[name]()
        subject.model.to(device)
        return cls(subject, OPTIMIZERS[optimizer](subject.model.parameters()), torch.device(device))

    def engine(self, plan: Plan) -> Engine:
        """An engine that obeys."""
        subject = self.subject
        return Engine(
            subject.model, subject.loss, optimizer=self.optimizer, batchnorm="local", plan=plan
        )

    def foresee(self, micro_batch: int, size: int) -> Plan:
        """What an engine of its own foresees for a batch, with room for everything."""
        subject = self.subject
        engine = Engine(
            subject.model,
            subject.loss,
            optimizer=self.optimizer,
            memory=AMPLE,
            micro_batch=micro_batch,
            batchnorm="local",
        )
        return engine.foresee(*subject.rows(size), timed=False)

    def forecast(self, size: int) -> Forecast:
        """What is known of every micro-batch of batches of at most `size` samples."""
        inputs = StepInputs(
            self.subject.model, CallableLoss(self.subject.loss), self.optimizer, Fixed("local")
        )
        batch = TensorBatch.of(*self.subject.rows(size))
        case = inputs.case(batch, inputs.modules(), trains=True)
        return forecast(case, self.optimizer, available=AMPLE, verify=True)

    def states(self) -> list[Tensor]:
        """What is there between two steps: parameters, buffers, and the optimizer's state."""
        model = self.subject.model
        return [*model.parameters(), *model.buffers(), *state_tensors(self.optimizer)]


def predicted(found: Forecast, way: Way) -> int:
    """The bytes of the peak, as a plan for it says."""
    exact = found.confirm(way.micro_batch, way.size)
    if not way.accumulator:
        return exact
    return max(exact, found.accumulator_peak(way.micro_batch, way.size, confirmed=True))


def settled(way: Way, bytes_: int) -> Plan:
    """A plan to be obeyed."""
    return Plan(
        micro_batch=way.micro_batch,
        mechanism="undivided" if way.name == "undivided" else "streaming",
        accumulate="accumulator" if way.accumulator else "in place",
        loss="",
        exact=FORESEEN,
        reasons=(),
        memory=Memory(AMPLE, "as given", bytes_, (), bytes_, bytes_, "foreseen before"),
    )


def held(ready: Ready, body: Callable[[], object]) -> int:
    """The bytes at the peak of `body`, counted from outside of the engine."""
    if ready.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        body()
        return int(torch.cuda.max_memory_allocated())
    with Meter(ready.device, {"states": ready.states()}) as meter:
        body()
    return int(meter.peak)


def step(ready: Ready, engine: Engine, rows: tuple[Tensor, Tensor]) -> None:
    """Forward, backward and update; gradients are gone before and after."""
    engine.backward(*rows)
    ready.optimizer.step()
    ready.optimizer.zero_grad()


def one_way(ready: Ready, found: Forecast, way: Way) -> Cells:
    """Two steps with the optimizer's state there: what was foreseen, and the peaks of both."""
    bytes_ = predicted(found, way)
    engine = ready.engine(settled(way, bytes_))
    rows = ready.subject.rows(way.size)
    first, second = (held(ready, lambda: step(ready, engine, rows)) for _ in range(2))
    plan = engine.plan
    assert plan is not None
    assert plan.micro_batch == way.micro_batch
    assert (plan.accumulate == "accumulator") == way.accumulator
    return {
        "micro_batch": way.micro_batch,
        "batch": way.size,
        "way": way.name,
        "predicted": bytes_,
        "first": first,
        "measured": second,
    }


def refereed(ready: Ready) -> Cells:
    """One undivided step in plain torch, counted by the meter and by the allocator."""
    inputs, targets = ready.subject.rows(REFEREED)

    def plain() -> None:
        ready.subject.loss(ready.subject.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        ready.optimizer.step()
        ready.optimizer.zero_grad()

    states = ready.states()
    there = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in states}.values())
    with Meter(ready.device, {"states": states}) as meter:
        plain()
    after, inside = allocated_peaks(plain, there, meter.timeline().events)
    return {"meter": meter.peak, "allocator": after, "inside": inside}


def one_pair(name: str, optimizer: str, device: str, requested: list[Way]) -> Cells:
    """Every way of one model with one optimizer.

    Where there is one with an accumulator, an engine of its own foresees the first of these too:
    what is compared with the steps is what a person is told.
    """
    ready = Ready.of(name, optimizer, device)
    start = perf_counter()
    found = ready.forecast(max(way.size for way in requested))
    seconds = perf_counter() - start
    agrees = {}
    for way in [way for way in requested if way.accumulator][:1]:
        plan = ready.foresee(way.micro_batch, way.size).memory
        assert plan is not None
        agrees = {"engine": plan.predicted, "here": predicted(found, way)}
    step(ready, ready.engine(settled(Way(2, 2), 0)), ready.subject.rows(2))  # states are made
    cells = [one_way(ready, found, way) for way in requested]
    pair = {"how": found.how, "seconds": round(seconds, 2), "agrees": agrees, "ways": cells}
    return pair | ({} if device == "cuda" else {"referee": refereed(ready)})
