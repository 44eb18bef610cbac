"""accelerate's documented loop with the engine in it, looked at before and after every step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from tests.oracle import assert_exact, state_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from anybatch import Engine, Plan

N, WORDS, LONGEST, CLASSES = 22, 11, 7, 5
Rows = tuple[Tensor, Tensor]


@dataclass
class Problem:
    """What is trained: a model, rows, and a loss."""

    model: Callable[[], nn.Module]
    rows: Callable[[], Rows]
    loss: Callable[[Tensor, Tensor], Tensor]


def tokens() -> Rows:
    """Texts of uneven lengths, which get shorter towards the end, and a prompt here and there."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(1, WORDS, (N, LONGEST), generator=draw)
    y = x.roll(-1, 1)
    lengths = torch.linspace(LONGEST, 1, N).long()
    y[torch.arange(LONGEST) >= lengths[:, None]] = -100
    y[::4, :2] = -100
    return x, y


def images() -> Rows:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(N, 1, 6, 6, generator=draw, dtype=torch.float64)
    return x, torch.randint(CLASSES, (N,), generator=draw)


def reader() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, WORDS))


def viewer() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES))


def of_tokens(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def of_classes(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, weight=torch.linspace(0.5, 2, CLASSES, dtype=out.dtype))


def dice(out: Tensor, y: Tensor) -> Tensor:
    found = out.softmax(1)
    both = (found * F.one_hot(y, CLASSES)).sum(0)
    return 1 - (2 * both / (found.sum(0) + CLASSES)).mean()


PROBLEMS = {
    "tokens": Problem(reader, tokens, of_tokens),
    "batchnorm": Problem(viewer, images, of_classes),
    "dice": Problem(viewer, images, dice),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return PROBLEMS[name].model().double()


@dataclass
class RunRecord:
    """What passed by on this rank: at every step the model before, all rows, and what came out."""

    before: list[dict[str, Tensor]] = field(default_factory=list)
    batches: list[Rows] = field(default_factory=list)
    after: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    plan: Plan | None = None
    end: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def accelerated(*, sharded: bool = False, **options: Any) -> Iterator[Accelerator]:
    """Make an Accelerator as if it were the first one of the process.

    Args:
        sharded: FSDP2 by its plugin. It turns that on where there is a GPU alone, though all it
            does works on gloo: so it is told that it has been turned on.
        options: what it takes.
    """
    _forget()
    accelerator = Accelerator(cpu=True, **options)
    if sharded:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
    try:
        yield accelerator
    finally:
        _forget()


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(
    name: str,
    how: dict[str, Any],
    *,
    batch: int = 7,
    epochs: int = 1,
    start: Path | None = None,
    keep: Path | None = None,
    sharded: bool = False,
    loaders: dict[str, Any] | None = None,
    clip: float | None = None,
    mixed: str = "no",
) -> RunRecord:
    """Train as accelerate's documentation has it.

    Args:
        name: of the problem.
        how: what the engine takes.
        batch: rows of a batch of each rank.
        epochs: how many, or up to which with `start`.
        start: a folder of save_state to go on from, after its first epoch.
        keep: a folder for save_state, after the first epoch.
        sharded: by FSDP2.
        loaders: what DataLoaderConfiguration takes.
        clip: the largest norm.
        mixed: precision; the model is in float32 then, and else in float64.
    """
    config = DataLoaderConfiguration(**(loaders or {}))
    options = {"dataloader_config": config, "mixed_precision": mixed}
    with accelerated(sharded=sharded, **options) as accelerator:
        problem, model = PROBLEMS[name], made(name)
        model = model if mixed == "no" else model.float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.95)
        loader = DataLoader(TensorDataset(*problem.rows()), batch_size=batch)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        if start is not None:
            accelerator.load_state(str(start))
            if (start / "plan.json").exists():
                how = {"plan": Plan.from_json((start / "plan.json").read_text())}
        engine = Engine(model, problem.loss, optimizer=optimizer, **how)
        record = RunRecord()
        for epoch in range(0 if start is None else 1, epochs):
            model.train()
            for rows, y in loader:
                x = rows if mixed == "no" or not rows.is_floating_point() else rows.float()
                record.before.append(_full_tensors(accelerator.unwrap_model(model).state_dict()))
                record.batches.append(everyones(accelerator, x, y))
                optimizer.zero_grad()
                loss = engine.backward(x, y)
                record.after.append(_full_tensors(state_of(accelerator.unwrap_model(model), loss)))
                if clip is not None:
                    norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                    record.norms.append(float(_full_tensors({"norm": norm})["norm"]))
                optimizer.step()
                schedule.step()
                record.rates.append(schedule.get_last_lr()[0])
            if keep is not None and epoch == 0:
                accelerator.save_state(str(keep))
                if engine.plan is not None and engine.plan.memory is not None:
                    (keep / "plan.json").write_text(engine.plan.to_json())
        record.plan = engine.plan
        record.end = _full_tensors(accelerator.unwrap_model(model).state_dict())
        return record


def everyones(accelerator: Accelerator, *tensors: Tensor) -> Any:
    """Return the rows of all ranks, in order, however many each has."""
    if accelerator.num_processes == 1:
        return tensors
    parts: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(parts, tensors)
    return tuple(torch.cat(pair) for pair in zip(*parts, strict=True))


def _full_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    spread = {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in state.items()}
    return {name: tensor.detach().clone() for name, tensor in spread.items()}


def assert_full_batch(name: str, record: RunRecord, steps: int) -> None:
    """Assert Law 1 for every step: torch alone, with the rows of all ranks in one forward."""
    assert len(record.after) == steps
    for before, (x, y), got in zip(record.before, record.batches, record.after, strict=True):
        model = made(name)
        model.load_state_dict(before)
        loss = PROBLEMS[name].loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        assert_exact(got, state_of(model, loss))


def plain_training(
    name: str, record: RunRecord, *, each: int = 1, clip: float | None = None
) -> dict[str, Tensor]:
    """Return what torch alone comes to with the batches that were seen, from the same start.

    Args:
        name: of the problem.
        record: its batches.
        each: steps of the schedule for a step.
        clip: the largest norm.
    """
    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.95)
    for (x, y), rate in zip(record.batches, record.rates, strict=True):
        optimizer.zero_grad()
        PROBLEMS[name].loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        for _ in range(each):
            schedule.step()
        assert schedule.get_last_lr()[0] == rate
    return model.state_dict()


def on_rank(
    rank: int, size: int, name: str, how: dict[str, Any], options: dict[str, Any]
) -> RunRecord:
    """Train on one of several ranks, which know each other already."""
    as_launched(rank, size)
    return train(name, how, **options)


def as_launched(rank: int, size: int) -> None:
    """Let a process look as if accelerate's or torch's launcher had started it."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size)
    )
    os.environ.update(ACCELERATE_USE_CPU="true", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
