"""How much a process grows in a training on the CPU, beside the bytes that were foreseen.

Live bytes are what tensors hold; a process holds more: what the allocator keeps of freed blocks,
what kernels take inside themselves, and all that Python makes. Linux counts a process's resident
bytes and their peak. The peak is set back first, which an own process may do with its own count;
where that is not allowed, the peak since the process began stands in, which can only be more.

What torch sets up once, its thread pools and the first kernel of a kind, is no cost of a step: a
step of a small network with the same kinds of layers goes before.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from anybatch import Engine, Plan
from anybatch.cli.allocator import Mode, glibc, settings_of
from benchmarks.mbs.prediction.live import AMPLE, PARTS, Ready
from benchmarks.mbs.prediction.models import OPTIMIZERS, Recurrent, next_token

MODULE = "benchmarks.mbs.prediction.growth"
MODES: tuple[Mode, ...] = ("default", "fast", "tight")
STEPS = 5
RATIO = 1.15  # the goal: growth <= RATIO x predicted + SLACK
SLACK = 50 * 10**6  # bytes
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
Cells = dict[str, Any]


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return _field("VmRSS")


def clear_peak() -> bool:
    """Set the peak back to what is there now; False where that is not allowed."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return True


def peak() -> int:
    """The most bytes of this process that were in memory since `clear_peak`, or ever."""
    return max(_field("VmHWM"), resident())


def _field(name: str) -> int:
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    if name in lines:
        return 1024 * int(lines[name].split()[0])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Small(nn.Module):
    """One layer of every kind that the subjects have."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8)
        )
        self.up, self.head = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, H, W] -> [n, 4]."""
        out: Tensor = self.head(self.up(self.convolutions(x)).mean((2, 3)))
        return out


def warm_up(optimizer: str) -> None:
    """A step of small networks."""
    images = Small()
    loss = functional.cross_entropy(images(torch.randn(4, 3, 8, 8)), torch.randint(4, (4,)))
    words, tokens = Recurrent(8), torch.randint(8, (4, 5))
    (loss + next_token(words(tokens), tokens)).backward()  # type: ignore[no-untyped-call]
    OPTIMIZERS[optimizer]([*images.parameters(), *words.parameters()]).step()


def grown(name: str, optimizer: str, micro_batch: int, plan: Plan | None) -> Cells:
    """Train some steps in this process; its growth from before the first of them.

    Args:
        name: of the subject.
        optimizer: of the optimizer.
        micro_batch: samples.
        plan: to be obeyed; None has the engine foresee inside of what is counted.
    """
    ready = Ready.of(name, optimizer, "cpu")
    subject = ready.subject
    rows = subject.rows(PARTS * micro_batch)
    warm_up(optimizer)
    states = sum(t.numel() * t.element_size() for t in ready.states())
    cleared, before = clear_peak(), resident()
    engine = Engine(
        subject.model,
        subject.loss,
        optimizer=ready.optimizer,
        batchnorm="local",
        memory=AMPLE if plan is None else None,
        micro_batch=micro_batch if plan is None else None,
        plan=plan,
    )
    peaks = []
    for _ in range(STEPS):
        engine.backward(*rows)
        ready.optimizer.step()
        ready.optimizer.zero_grad()
        peaks.append(peak() - before)
    obeyed = engine.plan
    assert obeyed is not None
    assert obeyed.memory is not None
    return {
        "growth": peaks[-1],
        "growth_by_step": peaks,
        "states": states,
        "cleared": cleared,
        "predicted": obeyed.memory.predicted if plan is None else plan_bytes(plan),
        "plan": obeyed.to_json(),
    }


def plan_bytes(plan: Plan) -> int:
    """What a plan has foreseen."""
    assert plan.memory is not None
    return plan.memory.predicted


def child(mode: Mode, job: Cells) -> Cells:
    """The same in a new process whose malloc was set before it started."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-m", MODULE],
        input=json.dumps(job),
        env={**ours, **settings_of(mode, glibc())},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: Cells = json.loads(done.stdout.splitlines()[-1])
    return found


def in_modes(
    name: str, optimizer: str, micro_batch: int, modes: Iterable[Mode], threads: int
) -> Cells:
    """Malloc modes with a plan made before, and the tight one with the planning counted too.

    The tensors that are there before the first step are in what was foreseen, and so are added to
    what the process has grown by since.
    """
    job = {"name": name, "optimizer": optimizer, "micro_batch": micro_batch, "threads": threads}
    planning = child("tight", {**job, "plan": None})
    plan = planning.pop("plan")
    found = {"tight, planning too": planning}
    for mode in modes:
        found[mode] = child(mode, {**job, "plan": plan})
        del found[mode]["plan"]
    return {mode: judged(cell) for mode, cell in found.items()}


def judged(cell: Cells) -> Cells:
    """The same, with its ratio to what was foreseen and whether it is within the goal."""
    total = cell["growth"] + cell["states"]
    within = total <= RATIO * cell["predicted"] + SLACK
    return cell | {"ratio": round(total / cell["predicted"], 4), "within": within}


def main() -> None:
    """Read a job, train, and print what was counted."""
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    plan = None if job["plan"] is None else Plan.from_json(job["plan"])
    print(json.dumps(grown(job["name"], job["optimizer"], job["micro_batch"], plan)))


if __name__ == "__main__":
    main()
