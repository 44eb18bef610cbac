"""One step in several ways, clocked in pairs, and what each of them holds."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import anybatch
from anybatch.memory.meter import Meter
from benchmarks.mbs.problem import Problem

Around = AbstractContextManager[Any]
LOTS = 1 << 50
WARM_UP = 3
"""Steps that are not clocked; the first one of `anybatch.offload` is recorded."""


class Step:
    """Forward and backward of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.model: nn.Module = problem.model
        self.rows: tuple[Tensor, Tensor] = (problem.inputs, problem.targets)
        assert problem.loss_fn is not None
        self._loss = problem.loss_fn
        self.device = problem.inputs.device

    def run(self, around: Around) -> float:
        """Return the seconds of one step from empty gradients."""
        self.model.zero_grad(set_to_none=True)
        self._wait()
        start = perf_counter()
        with around:
            loss: Tensor = self._loss(self.model(self.rows[0]), self.rows[1])
            loss.backward()  # type: ignore[no-untyped-call]
        self._wait()
        return perf_counter() - start

    def peak(self, around: Around) -> int:
        """Return the most live bytes of a step, with those of model and rows."""
        there = [*self.model.parameters(), *self.model.buffers(), *self.rows]
        self.model.zero_grad(set_to_none=True)
        with Meter(self.device, {"there": there}) as meter:
            self.run(around)
        peak: int = meter.peak
        return peak

    def gradients(self, around: Around) -> list[Tensor]:
        """Return the gradients of a step."""
        torch.manual_seed(0)
        self.run(around)
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def floor(step: Step, spill: Path | None) -> int:
    """Return the bytes that a step holds with all away that may be."""
    off = anybatch.offload(memory=LOTS, store=spill, device=step.device, recompute=False)
    step.run(off)
    assert off.last is not None
    assert off.last.predicted_bytes is not None
    return off.last.predicted_bytes


def ways(step: Step, shares: tuple[float, ...], spill: Path | None) -> dict[str, Any]:
    """Return what is compared: name -> what stands around a step.

    A share is of the live peak in memory; one that is below the floor is left out.
    """
    in_memory, least = step.peak(nullcontext()), floor(step, spill)
    found: dict[str, Any] = {
        f"{share:g} of the peak": anybatch.offload(
            memory=int(share * in_memory), store=spill, device=step.device
        )
        for share in shares
        if share * in_memory >= least
    }
    found["all that may leave"] = anybatch.offload(memory=least, store=spill, device=step.device)
    if step.device.type == "cuda":
        found["save_on_cpu"] = Anew(lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))
    return found


class Anew:
    """A context manager that can be entered again, made anew each time."""

    def __init__(self, make: Callable[[], Around]) -> None:
        self._make, self._open = make, list[Around]()

    def __enter__(self) -> None:
        self._open.append(self._make())
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


def measured(step: Step, around: Any, rounds: int) -> dict[str, Any]:
    """Return one way's seconds over those in memory, in pairs, and what it holds."""
    plain = nullcontext()
    for _ in range(WARM_UP):
        step.run(plain)
        step.run(around)
    ratios, seconds = [], []
    for index in range(rounds):
        pair = [step.run(one) for one in ((plain, around) if index % 2 else (around, plain))]
        memory, ours = pair if index % 2 else pair[::-1]
        ratios.append(ours / memory)
        seconds.append((memory, ours))
    peak = step.peak(around)
    found = {
        "wall": [round(cut, 4) for cut in quantiles(ratios, n=4)],
        "seconds in memory": round(median(one for one, _ in seconds), 5),
        "seconds": round(median(one for _, one in seconds), 5),
        "peak": peak,
        "exact": all(map(torch.equal, step.gradients(plain), step.gradients(around))),
    }
    if isinstance(around, anybatch.reports.Offload):
        assert around.last is not None
        found |= {
            "budget": around.memory,
            "predicted": around.last.predicted_bytes,
            "kind": around.last.mode,
            "out": around.last.out_bytes,
            "waited": round(around.last.waited, 5),
        }
    return found
