"""accelerate's own script for gradient accumulation, asked of an engine: what is in sync, and when.

Their script keeps a plain model beside a prepared one, hands it the rows of all ranks, and demands
that gradients, learning rates and updates agree at the end of every window, and not before. Their
model, data set and Accelerator are used here, on two processes; a window is one batch of the
loader, which the engine splits. What differs is listed in docs/decisions/trainings.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

pytest.importorskip(
    "accelerate", reason="pip install 'anybatch[transformers]' is needed for these tests"
)

from accelerate import DataLoaderConfiguration
from accelerate.test_utils import RegressionDataset, RegressionModel
from tests.integrations.loops import accelerated, as_launched, everyones

from anybatch import Engine

ROWS, WINDOW = 80, 32
"""Rows that there are, and of a window on a rank: the second window has what is left, 16."""
LOADERS = [
    {"split_batches": split, "dispatch_batches": dispatch}
    for split in (False, True)
    for dispatch in (False, True)
]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    with ranks(2) as found:
        yield found


def pairs(size: int) -> DataLoader[Any]:
    def collate(rows: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = (torch.tensor([float(row[name]) for row in rows]) for name in "xy")
        return x.double(), y.double()

    return DataLoader(RegressionDataset(length=ROWS, seed=42), batch_size=size, collate_fn=collate)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def windows(rank: int, size: int, loaders: dict[str, bool]) -> list[dict[str, Tensor]]:
    """Train with AdamW and a schedule, beside torch alone; return the gradients of each window."""
    as_launched(rank, size)
    config = DataLoaderConfiguration(**loaders)
    found = []
    with accelerated(dataloader_config=config) as accelerator:
        plain = RegressionModel().double()
        model: nn.Module = deepcopy(plain)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, model)]
        schedules = [LambdaLR(o, lr_lambda=lambda epoch: epoch**0.65) for o in optimizers]
        # split_batches: the loader's batch is that of all ranks
        loader = pairs(WINDOW * (2 if loaders["split_batches"] else 1))
        own, its = optimizers[0], schedules[0]
        model, optimizer, schedule, loader = accelerator.prepare(
            model, optimizers[1], schedules[1], loader
        )
        engine = Engine(model, nn.MSELoss(), optimizer=optimizer, micro_batch=5)
        for x, y in loader:
            own.zero_grad()
            every, wanted = everyones(accelerator, x, y)
            F.mse_loss(plain(every), wanted).backward()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            engine.backward(x, y)
            found.append(gradients(accelerator.unwrap_model(model)))
            assert_exact(found[-1], gradients(plain))
            optimizer.step()
            schedule.step()
            own.step()
            for _ in range(1 if loaders["split_batches"] else size):
                its.step()
            assert own.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
            assert_exact(accelerator.unwrap_model(model).state_dict(), plain.state_dict())
    return found


@pytest.mark.large(few=2)
@pytest.mark.parametrize("loaders", LOADERS, ids=str)
def test_gradients_are_in_sync_at_the_end_of_every_window(pair: Pool, loaders: Any) -> None:
    """The last one is ragged, and steps; the learning rates are those of torch alone."""
    one, other = pair.run(windows, loaders)
    assert len(one) == len(other) == 2
    for mine, its in zip(one, other, strict=True):
        assert all(torch.equal(gradient, its[name]) for name, gradient in mine.items())


def sums(rank: int, size: int) -> list[int]:
    """Count sums over ranks in the third step, by micro-batch."""
    as_launched(rank, size)
    found = []
    with accelerated() as accelerator:
        for micro_batch in (1, 4, WINDOW):
            model, loader = accelerator.prepare(RegressionModel().double(), pairs(WINDOW))
            engine = Engine(model, nn.MSELoss(), micro_batch=micro_batch)
            x, y = next(iter(loader))
            engine.backward(x, y)
            engine.backward(x, y)
            with profile(activities=[ProfilerActivity.CPU]) as watched:
                engine.backward(x, y)
            names = [event.name for event in watched.events() or ()]
            found.append(sum("gloo:all_reduce" in name for name in names))
    return found


def test_nothing_is_in_sync_before_the_end(pair: Pool) -> None:
    """However many micro-batches there are, gradients pass between ranks once."""
    for one, few, full in pair.run(sums):
        assert one == few == full >= 1


def unsynced(rank: int, size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    as_launched(rank, size)
    with accelerated() as accelerator:
        plain = RegressionModel().double()
        model, loader = accelerator.prepare(deepcopy(plain), pairs(WINDOW))
        x, y = next(iter(loader))
        with accelerator.no_sync(model):
            Engine(model, nn.MSELoss(), micro_batch=5).backward(x, y)
        every, wanted = everyones(accelerator, x, y)
        F.mse_loss(plain(every), wanted).backward()  # type: ignore[no-untyped-call]
        return gradients(accelerator.unwrap_model(model)), gradients(plain)


def test_no_sync_waits_for_nothing(pair: Pool) -> None:
    """We differ: a step of an engine is whole, and there is nothing that could wait."""
    for got, want in pair.run(unsynced):
        assert_exact(got, want)


def last_window(rank: int, size: int, full: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradient of the last of 5 micro-batches in windows of 2, and the true one."""
    as_launched(rank, size)
    micro, steps = 8, 2
    with accelerated(gradient_accumulation_steps=1 if full else steps) as accelerator:
        plain = RegressionModel().double()
        model: nn.Module = deepcopy(plain)
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = pairs(micro * steps if full else micro)
        model, optimizer, loader = accelerator.prepare(model, sgd, loader)
        engine = Engine(model, nn.MSELoss(), micro_batch=micro) if full else None
        for x, y in loader:
            if engine is not None:
                optimizer.zero_grad()
                engine.backward(x, y)
                continue
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                if accelerator.gradient_state.end_of_dataloader:
                    break  # with the gradient of the last window
                optimizer.step()
                optimizer.zero_grad()
        every, wanted = everyones(accelerator, x, y)
        F.mse_loss(plain(every), wanted).backward()  # type: ignore[no-untyped-call]
        return gradients(accelerator.unwrap_model(model)), gradients(plain)


def test_a_last_window_that_is_not_full_is_divided_by_what_came(pair: Pool) -> None:
    """We differ: accelerate divides the one micro-batch of its last window by two."""
    for got, want in pair.run(last_window, True):
        assert_exact(got, want)
    for got, want in pair.run(last_window, False):
        assert_exact({name: 2 * gradient for name, gradient in got.items()}, want)


def nested(rank: int, size: int) -> None:
    """Evaluate another loader in the middle of an epoch, as their script leaves one loader."""
    as_launched(rank, size)
    with accelerated() as accelerator:
        plain = RegressionModel().double()
        model, loader, other = accelerator.prepare(deepcopy(plain), pairs(WINDOW), pairs(16))
        engine = Engine(model, nn.MSELoss(), micro_batch=5)
        for x, y in loader:
            for inside in other:
                engine.evaluate(*inside)
                break
            plain.zero_grad()
            model.zero_grad()
            every, wanted = everyones(accelerator, x, y)
            F.mse_loss(plain(every), wanted).backward()  # type: ignore[no-untyped-call]
            engine.backward(x, y)
            assert_exact(gradients(accelerator.unwrap_model(model)), gradients(plain))


def test_a_loader_that_is_left_in_the_middle_changes_nothing(pair: Pool) -> None:
    pair.run(nested)
