"""A batch of 32,768 pairs in the memory that torch alone takes for 64, on encoders of real size."""

from typing import Any

import torch
from torch import Tensor

import anybatch
from anybatch.errors import BudgetError
from anybatch.memory.meter import FOREIGN, Meter
from benchmarks.integrations.contrastive.encoders import REAL, Subject
from benchmarks.integrations.contrastive.ways import TEMPERATURE, matrix, pair, undivided
from benchmarks.results import console

SMALL, MICRO_BATCH = 64, 16
Found = dict[str, Any]


def large(batches: tuple[int, ...], subject: Subject = REAL) -> Found:
    """Peaks of a step by batch, all within the peak of `SMALL` undivided, and what is foreseen."""
    torch.set_num_threads(1)
    model = pair(*subject.encoders())
    budget = undivided_peak(subject)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    found: Found = {"small": SMALL, "budget": budget, "parameters": parameters, "rows": []}
    for batch in batches:
        console.print(f"a step of {batch} within {budget} bytes")
        found["rows"].append(step(subject, batch, budget))
    return found


def undivided_peak(subject: Subject) -> int:
    """Live bytes at the peak of torch's own step of `SMALL` rows, the first or a later one."""
    f, g = subject.encoders()
    rows, run = subject.rows(SMALL), undivided(f, g, SMALL)
    parameters = list(pair(f, g).parameters())
    run(*rows)
    for p in parameters:
        p.grad = None
    with Meter(rows[0].device, {"parameters": parameters, FOREIGN: rows}) as meter:
        run(*rows)
    return int(meter.peak)


def step(subject: Subject, batch: int, budget: int) -> Found:
    """One step of ours within a budget; and what the loss with its matrix would need."""
    rows = subject.rows(batch)
    images, texts = subject.encoders()
    model = anybatch.Encoders({"image": images, "text": texts})
    loss = anybatch.contrastive(temperature=TEMPERATURE)
    engine = anybatch.Engine(model, loss, memory=budget, micro_batch=MICRO_BATCH)
    engine.backward({"image": rows[0], "text": rows[1]})
    last = engine.last
    assert last is not None
    d = texts(rows[1][:1]).shape[1]
    return {
        "batch": batch,
        "micro_batch": last.micro_batch,
        "peak": last.peak_bytes,
        "predicted": last.predicted_bytes,
        "seconds": last.seconds,
        "embeddings": 4 * batch * d * 4,  # of two encoders, and their gradients
        "matrix": 4 * batch * batch,
        "matrix_needs": needed(subject, rows),
    }


def needed(subject: Subject, rows: tuple[Tensor, Tensor]) -> int:
    """Bytes that the plan foresees with the matrix, in micro-batches of one sample."""
    model = pair(*subject.encoders())
    engine = anybatch.Engine(model, lambda out: matrix(*out), memory=1 << 20, micro_batch=1)
    try:
        engine.foresee(rows, timed=False)
    except BudgetError as error:
        return error.needed
    raise AssertionError("a mebibyte is not enough for the parameters")
