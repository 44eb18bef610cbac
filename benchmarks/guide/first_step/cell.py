"""One network within one budget, in a process of its own, which prints what it took as JSON."""

import json
import statistics
import sys
from time import perf_counter
from typing import Any

import torch

from anybatch import Engine, Plan
from anybatch.errors import BudgetError
from benchmarks.guide.first_step.networks import NETWORKS, Subject

SEED = 0
SETTLED = 10
"""Last steps, whose median is a later step."""
SWEEP = 5
"""Steps of each size of the sweep; the first one is not counted."""


def steps(engine: Engine, subject: Subject, count: int) -> tuple[list[float], int]:
    """Return the seconds of each step, and the last step at which the plan's size changed."""
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e-3)
    seconds, sizes = [], []
    for _ in range(count):
        start = perf_counter()
        optimizer.zero_grad()
        engine.backward(subject.inputs, subject.targets)
        optimizer.step()
        seconds.append(perf_counter() - start)
        assert engine.last is not None
        sizes.append((engine.last.micro_batch, engine.last.moved_bytes > 0))
    settled = next((at for at in range(count, 1, -1) if sizes[at - 1] != sizes[at - 2]), 1)
    return seconds, settled


def engine_of(subject: Subject, **options: Any) -> Engine:
    """Return an engine for it."""
    return Engine(subject.model, subject.loss_fn, **options)


def made(name: str) -> Subject:
    """Return the network, the same one every time."""
    torch.manual_seed(SEED)
    return NETWORKS[name]()


def edges(name: str) -> tuple[int, int]:
    """Return the fewest bytes that a step needs, and those of an undivided one."""
    subject = made(name)
    full = engine_of(subject, memory=1 << 50).foresee(subject.inputs, subject.targets, timed=False)
    assert full.memory is not None
    try:
        engine_of(subject, memory=1).foresee(
            subject.inputs, subject.targets, timed=False, offload="off"
        )
    except BudgetError as error:
        return error.needed, full.memory.predicted
    raise AssertionError("a byte is a budget")


def sweep(name: str, budget: int, largest: int) -> dict[int, float]:
    """Return size -> median seconds of a step, all in memory, of the powers of two that fit."""
    found = {}
    sizes = {1 << k for k in range(11) if 1 << k < largest} | {largest}
    for n in sorted(sizes, reverse=True):
        subject = made(name)
        try:
            engine = engine_of(subject, memory=budget, micro_batch=n)
            plan = engine.foresee(subject.inputs, subject.targets, timed=False, offload="off")
            seconds, _ = steps(engine_of(subject, plan=plan), subject, SWEEP)
        except BudgetError:
            continue
        found[n] = statistics.median(seconds[1:])
        if found[n] > 2 * min(found.values()):
            break
    return found


def measured(name: str, budget: int, count: int) -> dict[str, Any]:
    """Return the seconds of a training's first steps, and of the best fixed size."""
    subject = made(name)
    engine = engine_of(subject, memory=budget)
    seconds, settled = steps(engine, subject, count)
    assert isinstance(engine.plan, Plan)
    assert engine.last is not None
    chosen = engine.last.micro_batch
    later = statistics.median(seconds[-SETTLED:])
    again = made(name)
    second, _ = steps(engine_of(again, memory=budget), again, 1)
    swept = sweep(name, budget, min(subject.size, 2 * chosen))
    best = min([*swept.values(), later])
    return {
        "budget": budget,
        "first": seconds[0],
        "later": later,
        "total": sum(seconds),
        "best": best,
        "swept": swept,
        "settled": settled,
        "micro_batch": chosen,
        "moves": engine.last.moved_bytes > 0,
        "second_start": second[0],
        "seconds": seconds,
    }


if __name__ == "__main__":
    network, share, count = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    least, most = edges(network)
    print(json.dumps(measured(network, round(least + share * (most - least)), count)))
