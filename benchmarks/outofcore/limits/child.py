"""One training step in a process of its own, which is told what to do a line at a time.

    parent   {"name", "batch", "limit", "memory"}      child   {"live", "there"}
             {"do": "step"}                                    {"seconds", "digest", ...}

What torch loads late is loaded first, by a step of two samples; only then is the limit set.
"""

import gc
import hashlib
import json
import resource
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import anybatch
from anybatch.core.oom import out_of_memory
from benchmarks.mbs.tables.limited import data_bytes
from benchmarks.outofcore.limits.problems import SMALL, made
from benchmarks.outofcore.offload.steps import LOTS, Step


def say(found: dict[str, Any]) -> None:
    """Answer the parent."""
    print(json.dumps(found), flush=True)


def resident(name: str) -> int:
    """Return VmRSS, or VmHWM, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def warm(name: str, spill: str | None) -> None:
    """Load what torch loads late."""
    step, off = Step(made(name, SMALL)), anybatch.offload(memory=LOTS, store=spill)
    for around in (nullcontext(), off, off):
        step.run(around)
    step.peak(nullcontext())
    off.close()


def digest(step: Step) -> str:
    """Return what tells the bytes of all gradients."""
    found = hashlib.sha256()
    for p in step.model.parameters():
        assert p.grad is not None
        found.update(p.grad.numpy().tobytes())
    return found.hexdigest()


def one_step(step: Step, around: Any) -> dict[str, Any]:
    """Run a step; return its seconds, what it held beyond before it, and what left."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins at VmRSS again
    seconds = step.run(around)
    found: dict[str, Any] = {"seconds": seconds, "high": resident("VmHWM"), "digest": digest(step)}
    if isinstance(around, anybatch.reports.Offload):
        assert around.last is not None
        found |= {"out": around.last.out_bytes, "waited": around.last.waited}
        found |= {"kind": around.last.mode, "predicted": around.last.predicted_bytes}
    return found


def main() -> None:
    """Obey until the parent closes the pipe."""
    torch.set_num_threads(1)
    order = json.loads(sys.stdin.readline())
    name, spill = order["name"], order["spill"]
    warm(name, spill)
    gc.collect()
    base = {"data": data_bytes(), "rss": resident("VmRSS")}
    if order["limit"] is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (base["data"] + order["limit"], hard))
    step = Step(made(name, order["batch"]))
    around: Any = nullcontext()
    if order["memory"] is not None:
        around = anybatch.offload(memory=order["memory"], store=spill)
    say(base)
    for line in sys.stdin:
        try:
            say({"peak": step.peak(around)} if "peak" in line else one_step(step, around))
        except (RuntimeError, MemoryError, anybatch.errors.AnybatchError) as error:
            say({"failed": "refused" if out_of_memory(error) else str(error)})
            return


if __name__ == "__main__":
    main()
