"""A draw is planned and trained in a process of its own, under a limit that the kernel keeps.

The limit is RLIMIT_DATA: what the process maps when network, data and kernels are ready, plus the
budget and, for what is no tensor, a quarter of it and a constant: the interpreter plans, threads
have heaps of their own, and kernels need scratch. The quarter is the rule by which anybatch takes
four fifths of such a limit where no memory is given. A live meter around the planning and around
each step says, beside that, whether tensors keep to the budget itself.

A refusal is taken at its word with the limit lifted: what it says is needed is given, and every
micro-batch of 1, 2, 4 ... and all samples is run. It is true if none of these holds less than the
budget.
"""

import resource
import threading
from contextlib import nullcontext
from typing import Any

import torch

from anybatch import Engine, Plan
from anybatch.core.optimizers import state_tensors
from anybatch.errors import AnybatchError, BudgetError
from anybatch.memory.meter import Meter, _run
from benchmarks.guide.draws.draws import Draw, Training
from benchmarks.mbs.tables.limited import STACK, DataLimit

HEADROOM = 1.25
"""Times the budget, the data that the process may map more."""

EXTRA = 256 << 20
"""Further bytes: graphs and caches of rehearsals, heaps of threads, and scratch of kernels."""

STEPS = 3
Found = dict[str, Any]


def child(seed: int) -> Found:
    """Return what has become of a draw."""
    torch.set_num_threads(1)
    threading.stack_size(STACK)
    draw = Draw(seed)
    training = draw.make()
    budget = draw.budget(training)
    _warm(draw)
    limit = DataLimit(round(HEADROOM * budget) + EXTRA + draw.size * STACK)
    found: Found = {
        **{name: getattr(draw, name) for name in ("seed", "network", "optimizer", "size")},
        "asked": draw.requests,
        "budget": budget,
        "ended": "in budget",
    }
    _run.cache_clear()  # what was learned of kernels is to be learned under the limit
    limit.begin()
    try:
        found |= _trained(training, draw, budget)
    except BudgetError as error:
        limit.lift()
        found |= {"ended": "refused", "needed": error.needed}
        found |= _believed(training, draw, budget, error.needed)
    except (AnybatchError, RuntimeError, MemoryError) as error:
        limit.lift()
        found |= {"ended": "failed", "why": f"{type(error).__name__}: {error}"[:400]}
    finally:
        limit.lift()
    return found


def _warm(draw: Draw) -> None:
    """Map what the first step and plan of a process map: kernels, threads, and the tracer."""
    other = draw.make()
    x, y = other.batch[0][:2], other.batch[1][:2]
    other.batch = x, y
    plan = other.plan("1TiB", timed=False)
    Engine(other.model, other.loss_fn, plan=plan).backward(x, y)


def _trained(training: Training, draw: Draw, budget: int) -> Found:
    """Plan, and take some steps; return what they held."""
    before = _resident()
    with _meter(training) as meter:
        plan = training.plan(budget, **draw.requests)
    peaks, engine = _steps(training, plan, STEPS)
    assert plan.memory is not None
    assert engine.plan is not None
    assert engine.last is not None
    over = max(*peaks, meter.peak) > budget
    return {
        "ended": "over" if over else "in budget",
        "micro_batch": plan.micro_batch,
        "mechanism": plan.mechanism,
        "away": plan.offload is not None,
        "states": plan.states is not None,
        "predicted": plan.memory.predicted,
        "peaks": peaks,
        "retries": engine.last.retries,
        "now": engine.plan.micro_batch,
        "planning": meter.peak,
        "grown": _resident() - before,
    }


def _steps(training: Training, plan: Plan, steps: int) -> tuple[list[int], Engine]:
    """Take some steps of a plan; return the most bytes that each has held."""
    engine = Engine(training.model, training.loss_fn, optimizer=training.optimizer, plan=plan)
    optimizer = training.optimizer
    peaks = []
    with engine.states or nullcontext():
        for _ in range(steps):
            optimizer.zero_grad()
            with _meter(training) as meter:
                engine.backward(*training.batch)
                optimizer.step()
            peaks.append(int(meter.peak))
    return peaks, engine


def _meter(training: Training) -> Meter:
    """Return what counts the live bytes of a training, those of its batch not among them."""
    model, optimizer = training.model, training.optimizer
    existing = {
        "there": [*model.parameters(), *model.buffers()],
        "optimizer": list(state_tensors(optimizer)),
    }
    return Meter(torch.device("cpu"), existing)


def _resident() -> int:
    """Return the most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _believed(training: Training, draw: Draw, budget: int, needed: int) -> Found:
    """Return the least that any candidate holds when it is tried, and whether it is too much."""
    size, fixed = draw.size, draw.requests.get("micro_batch")
    sizes = [fixed] if fixed else [*{*(2**k for k in range(size.bit_length())), size}]
    offload = draw.requests.get("offload", "auto")
    tries: list[tuple[int | str, Found]] = [(needed, draw.requests)]
    alike: Found = {key: draw.requests[key] for key in ("rng", "workspace") if key in draw.requests}
    settings: Found = {"offload": "off", "timed": False, **alike}
    tries += [("1TiB", {"micro_batch": n, **settings}) for n in sizes]
    held = {}
    for memory, options in tries if offload != "file" else tries[:1]:
        try:
            plan = training.plan(memory, **options)
        except BudgetError as error:
            held[f"{memory} {options}"] = error.needed
            continue
        held[f"{memory} {options}"] = max(_steps(training, plan, 2)[0])
    least, enough = min(held.values()), next(iter(held.values())) <= needed
    return {"least": least, "true": least > budget, "as needed": enough}
