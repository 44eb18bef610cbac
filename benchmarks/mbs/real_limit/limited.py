"""A training in a child process that really cannot get more memory, and how it ended.

A limit that is only counted proves nothing about the allocator, the kernels' workspace or
fragmentation. RLIMIT_DATA is the kernel's own: past it, malloc and mmap fail. The limit is what
the process maps privately when everything is ready (VmData) plus the budget, so the budget is
what the steps may add, whatever the interpreter and torch weigh.

The child lifts the limit before it reports. One that is killed is reported by its parent.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.environment import MALLOC, Environment, environment
from benchmarks.mbs.real_limit.training import Make, Run, ready

PLAIN = "benchmarks.mbs.real_limit.plain:make"


@dataclass(frozen=True)
class Ended:
    """How a training ended: with its losses and weights' digest, or with an error or a signal.

    `growth_bytes` is how far the resident memory rose above that of the ready process, None
    where the kernel cannot say.
    """

    outcome: str  # "finished" or "died"
    error: str
    losses: list[float]
    seconds: float | None
    ready_bytes: int | None
    growth_bytes: int | None
    digest: str
    environment: Environment | None


def limited(
    make: str,
    run: Run,
    budget: int | None,
    *,
    malloc: str = "default",
    weights: Path | None = None,
) -> Ended:
    """Train in a child with at most `budget` more bytes than it holds when ready.

    Args:
        make: the step, as `package.module:function` of the type `training.Make`.
        run: the training.
        budget: bytes that the steps may add, None for no limit.
        malloc: name of a mode of `benchmarks.environment.MALLOC`.
        weights: file that receives the last weights of a training that finished.
    """
    ours = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    order = {
        "make": make,
        "run": asdict(run),
        "budget": budget,
        "weights": weights and str(weights),
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mbs.real_limit.limited", json.dumps(order)],
        env={**ours, **MALLOC[malloc]},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return Ended(**json.loads(done.stdout.splitlines()[-1]))
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    code = done.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return Ended("died", ": ".join([how, *last]), [], None, None, None, "", None)


def status_bytes(name: str) -> int:
    """A figure of /proc/self/status, such as VmData, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(kib) * 1024


def _forget_peak() -> bool:
    """Let VmHWM start again from what is resident now; whether the kernel did."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _train(run: Run, make: Make, budget: int | None, weights: str | None) -> Ended:
    torch.set_num_threads(1)
    trained, train = ready(run, make, budget)
    forgotten, hard = _forget_peak(), resource.getrlimit(resource.RLIMIT_DATA)[1]
    held, resident = status_bytes("VmData"), status_bytes("VmRSS")
    if budget is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (held + budget, hard))
    start, outcome, error = perf_counter(), "finished", ""
    try:
        train()
    except (RuntimeError, MemoryError) as raised:
        outcome, text = "died", str(raised).strip().splitlines()
        error = ": ".join([type(raised).__name__, *text[:1]])
    seconds = perf_counter() - start
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    growth = status_bytes("VmHWM") - resident if forgotten else None
    if weights and outcome == "finished":
        torch.save(trained.weights, weights)
    digest = trained.digest() if trained.weights else ""
    return Ended(outcome, error, trained.losses, seconds, held, growth, digest, environment())


def _child(order: dict[str, Any]) -> None:
    module, _, name = order["make"].partition(":")
    make: Make = getattr(import_module(module), name)
    run = Run(**{**order["run"], "blocks": tuple(order["run"]["blocks"])})
    print(json.dumps(asdict(_train(run, make, order["budget"], order["weights"]))))


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
