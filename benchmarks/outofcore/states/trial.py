"""One training of a deep network in this process, in one way, free or under a limit."""

import hashlib
import json
import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

import anybatch
from benchmarks.environment import environment

WIDTH = 1024
ROWS = 8
LAYER = 4 * WIDTH * WIDTH
STATES = 4
"""Parameters, gradients and the two tensors that AdamW keeps of each."""


def network(depth: int) -> nn.Module:
    """Layers without a bias; all of one size."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))


def data_bytes() -> int:
    """Return VmData of this process: what RLIMIT_DATA is compared with."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) << 10


def around(
    way: str, model: nn.Module, optimizer: torch.optim.Optimizer, memory: int, spill: str | None
) -> AbstractContextManager[Any]:
    """Return what stands around the training."""
    if way == "in memory":
        return nullcontext()
    paged = model if way == "all away" else None
    return anybatch.offload_states(optimizer, model=paged, memory=memory, store=spill)


def trained(depth: int, way: str, memory: int, steps: int, spill: str | None) -> dict[str, Any]:
    """Train, and return the seconds of a step and what came out of it."""
    model, seconds = network(depth), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(ROWS, WIDTH)
    moved = 0
    with around(way, model, optimizer, memory, spill) as states:
        for _ in range(steps + 1):
            start = perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            seconds.append(perf_counter() - start)
        if states is not None:
            assert states.last is not None
            moved = states.last.out_bytes + states.last.back_bytes
            optimizer.zero_grad()
            states.close()
    bits = hashlib.sha256()
    for parameter in model.parameters():
        bits.update(parameter.detach().numpy().tobytes())
    return {"seconds": median(seconds[1:]), "moved": moved, "bits": bits.hexdigest()}


def main() -> None:
    """Read what is to be done, and print what has come of it as JSON."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    limit = settings.pop("limit")
    trained(1, settings["way"], 1 << 30, 1, settings["spill"])  # what torch imports and keeps
    if limit is not None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + limit, hard))
    before = data_bytes()
    try:
        found = trained(**settings)
    except (RuntimeError, MemoryError) as error:
        found = {"failed": str(error).splitlines()[0][:80]}
    print(json.dumps(found | {"limit": limit, "base": before, "environment": environment()}))


if __name__ == "__main__":
    main()
