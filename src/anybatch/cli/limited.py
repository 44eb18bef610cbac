"""One training under a limit that the system keeps, and how it ended: a process of `compare`.

That a batch "would not fit" is a computation; that malloc refuses is a fact. RLIMIT_DATA is the
kernel's own limit, on what a process maps for itself, and cannot be evaded by a kernel's workspace
or by fragments. On CUDA it is torch's allocator that refuses.

    limit = held when model, data and plan are ready + budget + allowance

The allowance is for memory outside of tensors: the interpreter, kernels' code and workspace,
fragments. It is the same for every training. Only steps are limited; the limit is lifted while data
are read and while an error is reported. The first step counts live bytes, so `seconds` omits it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybatch import Engine, Plan
from anybatch import plan as foresee
from anybatch.cli.build import RunParts, build, make_optimizer, make_schedule, seeded
from anybatch.cli.metrics import plain_loss
from anybatch.cli.progress import Progress
from anybatch.cli.settings import Settings
from anybatch.cli.views import LoadedBatch, Reading
from anybatch.devices import MemoryLimit, RNGState, live_peak
from anybatch.errors import AnybatchError
from anybatch.units import parse_bytes

READY = "ready"
SHARE, OFFSET = 0.15, 50 * 10**6  # of the budget, and bytes
Take = Callable[[LoadedBatch], Tensor]
Step = tuple[Take, Callable[[], int | None]]  # and its peak of live bytes
Limited = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a training ended.

    `error` is empty where it fitted. `steps` are complete; `seconds` are those of one on a
    mini-batch of full size, the median; `peak` is bytes of live tensors in the first step, `growth`
    how far the process grew; `loss` is the last step's.
    """

    error: str = ""
    steps: int = 0
    seconds: float | None = None
    peak: int | None = None
    growth: int | None = None
    loss: float | None = None


def allowance(budget: int) -> int:
    """Return the bytes that a process may grow in addition to its budget."""
    return int(SHARE * budget) + OFFSET


def train_limited(settings: Settings, steps: int, *, plain: bool) -> Ended:
    """Take `steps` steps, at most the run's own, `plain` or with the engine, under the limit.

    The return value contains the reason for an early end.
    """
    with seeded(settings.seed, settings.threads):
        parts = build(settings)
        batches = _batches(settings, parts, steps)
        batch = next(batches)
        plan = _plan(settings, parts, batch)
        limited = _limit(parts.device, parse_bytes(settings.memory))
        sys.stdout.write(f"{READY}\n")
        sys.stdout.flush()
        if plain:
            return _steps(_plain(settings, parts), batch, batches, limited)
        if isinstance(plan, AnybatchError):
            return Ended(error=_first_line(plan))
        return _steps(_streamed(settings, parts, plan), batch, batches, limited)


def _steps(
    step: Step, batch: LoadedBatch | None, batches: Iterator[LoadedBatch], limited: Limited
) -> Ended:
    """Take the steps, until one fails."""
    take, peak = step
    before, loss, error, done = _resident(), None, "", 0
    full_size, seconds = len(batch.inputs) if batch is not None else 0, []
    while batch is not None:
        started = time.perf_counter()
        try:
            with limited():
                loss = float(take(batch))
        except Exception as raised:
            error = _first_line(raised)
            break
        done += 1
        if len(batch.inputs) == full_size:
            seconds.append(time.perf_counter() - started)
        batch = None  # one at a time, not with the next
        batch = next(batches, None)
    return Ended(
        error=error,
        steps=done,
        seconds=statistics.median(seconds[1:] or seconds) if seconds else None,
        peak=peak(),
        growth=_grown(before),
        loss=loss,
    )


def _plan(settings: Settings, parts: RunParts, batch: LoadedBatch) -> Plan | AnybatchError:
    """Return the plan, or the error that prevents it; the RNG state is restored.

    The plain training makes it too, and makes nothing of it: so both begin alike, with kernels
    and modules loaded.
    """
    state = RNGState.now()
    parts.model.train()
    try:
        return foresee(
            parts.model,
            parts.loss,
            (batch.inputs, batch.targets),
            memory=settings.memory,
            micro_batch=settings.micro_batch,
            workspace=settings.workspace,
            optimizer=make_optimizer(parts.recipe, parts.model.parameters()),
            batchnorm=settings.batchnorm,
        )
    except AnybatchError as error:
        return error.with_traceback(None)
    finally:
        state.put_back()


def _plain(settings: Settings, parts: RunParts) -> Step:
    """Return the step of a loop without the engine: the full batch at once."""
    model, loss_fn = parts.model, plain_loss(parts.recipe.loss)
    update = _update(settings, parts, make_optimizer(parts.recipe, model.parameters()))
    there = {"parameters": model.parameters(), "buffers": model.buffers()}
    peaks: list[Callable[[], int]] = []

    def take(batch: LoadedBatch) -> Tensor:
        with contextlib.ExitStack() as first:
            if not peaks:
                peaks.append(first.enter_context(live_peak(parts.device, there)))
            inputs, targets = batch.inputs.to(parts.device), batch.targets.to(parts.device)
            loss: Tensor = loss_fn(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
        update()
        return loss.detach()

    return take, lambda: next((peak() for peak in peaks), None)


def _streamed(settings: Settings, parts: RunParts, plan: Plan) -> Step:
    """Return the step with the engine."""
    optimizer = make_optimizer(parts.recipe, parts.model.parameters())
    update = _update(settings, parts, optimizer)
    engine = Engine(
        parts.model, parts.loss, optimizer=optimizer, batchnorm=settings.batchnorm, plan=plan
    )
    peaks: list[int | None] = []

    def take(batch: LoadedBatch) -> Tensor:
        loss = engine.backward(batch.inputs, batch.targets)
        assert engine.last is not None
        peaks.append(engine.last.peak_bytes)
        update()
        return loss

    return take, lambda: next(iter(peaks), None)


def _update(
    settings: Settings, parts: RunParts, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    """Return the function that updates the parameters after a gradient, as the run would."""
    steps = parts.recipe.epochs * len(parts.loader(settings, shuffle=True))
    schedule = make_schedule(parts.recipe, optimizer, steps)

    def update() -> None:
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return update


def _batches(settings: Settings, parts: RunParts, steps: int) -> Iterator[LoadedBatch]:
    loader, done = parts.loader(settings, shuffle=True), 0
    reading = Reading(Progress(), skip_corrupt=settings.skip_corrupt)
    for epoch in range(1, parts.recipe.epochs + 1):
        for _, batch in reading.epoch(loader, epoch):
            if done == steps:
                return
            done += 1
            yield batch


def _limit(device: torch.device, budget: int) -> Limited:
    """Return a factory of contexts with limited memory, counted from the bytes in use now."""
    limit = MemoryLimit(device, budget + allowance(budget))
    return lambda: limit


def _resident() -> int | None:
    """Reset the peak of resident memory; return the resident bytes, None where unavailable."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def _grown(before: int | None) -> int | None:
    return None if before is None else max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    """Return a figure of /proc/self/status, such as VmRSS, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return ": ".join([type(error).__name__, *text.splitlines()[:1]])


def main() -> None:
    """Read the settings of a training from the first argument, and print its result as JSON."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    values = order["settings"]
    size = values["image_size"]
    settings = Settings(**{**values, "image_size": None if size is None else tuple(size)})
    ended = train_limited(settings, order["steps"], plain=order["plain"])
    sys.stdout.write(json.dumps(dataclasses.asdict(ended)) + "\n")


if __name__ == "__main__":
    main()
