"""One batch in one way, in a process of its own: what it takes, what it holds, or why it cannot.

The device is held to its cap: on CUDA by torch's allocator, which refuses more
(``set_per_process_memory_fraction``); on the CPU live bytes are counted in one more step, and one
that holds more is said to have failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch.cli.models.resnet import Residual
from anybatch.core.oom import out_of_memory
from anybatch.core.units import show_bytes
from anybatch.memory.meter import Meter
from benchmarks.outofcore.table1.clocks import clocked
from benchmarks.outofcore.table1.settings import AGAIN, CACHING, EXPANDABLE, SAVED, SETTINGS

Found = dict[str, Any]
WARM_UP = 3
"""Steps that are not clocked; the first one of `anybatch.offload` is recorded."""

SEGMENTS = "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True)
class Job:
    """What a process does.

    Attributes:
        setting: by its name.
        device: cpu or cuda.
        way: one of those of the setting.
        n: samples.
        cap: bytes of the device.
        rounds: steps that are clocked.
        share: of the cap, what `anybatch.offload` is given.
    """

    setting: str
    device: str
    way: str
    n: int
    cap: int
    rounds: int
    share: float = 1.0


class Training:
    """A model, its optimizer and a batch on the device."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(0)
        setting, self.device = SETTINGS[job.setting], torch.device(job.device)
        self.model = setting.model().to(self.device)
        if job.way == AGAIN:
            for module in self.model.modules():
                if isinstance(module, Residual):
                    again = partial(checkpoint, module.forward, use_reentrant=False)
                    module.forward = again  # type: ignore[method-assign]
        self.loss_fn = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)
        self.x = torch.randn(job.n, 3, setting.image, setting.image, device=self.device)
        self.y = torch.randint(10, (job.n,), device=self.device)

    def step(self, around: AbstractContextManager[Any]) -> None:
        """Forward, backward and update."""
        self.optimizer.zero_grad(set_to_none=True)
        with around:
            loss: Tensor = self.loss_fn(self.model(self.x), self.y)
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def there(self) -> list[Tensor]:
        """Return what is there all the time."""
        states = [t for one in self.optimizer.state.values() for t in one.values() if t is not None]
        return [*self.model.parameters(), *self.model.buffers(), *states, self.x, self.y]


def run(job: Job) -> Found:
    """Return the seconds of a step and the bytes it held, or why there is none."""
    try:
        return _run(job)
    except (RuntimeError, MemoryError) as error:
        if not (out_of_memory(error) or isinstance(error, anybatch.errors.BudgetError)):
            raise
        return {"failed": str(error).split("\n")[0]}


def _run(job: Job) -> Found:
    device = torch.device(job.device)
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.cap / total))
    training = Training(job)
    budget = int(job.share * job.cap)
    off = anybatch.offload(memory=budget, device=device) if _moves(job) else None
    saved = torch.autograd.graph.save_on_cpu

    def step() -> None:
        plain = saved(pin_memory=True) if job.way == SAVED else nullcontext()
        training.step(off or plain)

    for _ in range(WARM_UP):
        step()
    seconds = [clocked(device, step) for _ in range(job.rounds)]
    found: Found = {"seconds": round(median(seconds), 5), "steps": [round(s, 5) for s in seconds]}
    if off is not None and off.last is not None:
        moved = {"out": off.last.out_bytes, "back": off.last.back_bytes}
        found |= moved | {"budget": budget, "kind": off.last.mode, "waited": off.last.waited}
    return found | _held(job, training, off)


def _moves(job: Job) -> bool:
    return job.way in (CACHING, EXPANDABLE)


def _held(job: Job, training: Training, off: anybatch.reports.Offload | None) -> Found:
    """Return the most bytes of a step; on the CPU that is where the cap is looked after."""
    if training.device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved(training.device)
        return {"peak": torch.cuda.max_memory_allocated(training.device), "reserved": reserved}
    with Meter(training.device, {"there": training.there()}) as meter:
        training.step(off or nullcontext())
    if meter.peak > job.cap:
        return {"failed": f"holds {show_bytes(meter.peak)}"}
    return {"peak": meter.peak}


def run_in_process(job: Job) -> Found:
    """Run a job in a process of its own, whose allocator was chosen before it began."""
    environment = {key: value for key, value in os.environ.items() if key != SEGMENTS}
    if job.way != CACHING:
        environment[SEGMENTS] = "expandable_segments:True"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.outofcore.table1.one", json.dumps(asdict(job))],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: Found = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    print(json.dumps(run(Job(**json.loads(sys.argv[1])))))
