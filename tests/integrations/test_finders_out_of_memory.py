"""The simulated lack of memory by which accelerate and Lightning test how they find a batch size.

A finder tries a training with a smaller batch until it does not fail. Their tests raise the words
of such errors where a batch is too large; here a model raises them where a micro-batch is. The
batch stays what it was. What differs is in docs/decisions/trainings.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, same, snapshot, undivided
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip(
    "accelerate", reason="pip install 'anybatch[transformers]' is needed for these tests"
)
pytest.importorskip(
    "lightning.pytorch", reason="pip install 'anybatch[lightning]' is needed for these tests"
)

from accelerate.utils.memory import (
    find_executable_batch_size,
    should_reduce_batch_size,
)
from lightning.pytorch.utilities.memory import is_oom_error
from tests.integrations.fits import N, Net, fit, made, rows

from anybatch import Engine
from anybatch.core.oom import out_of_memory
from anybatch.integrations.lightning import FullBatch

FULL = "CUDA out of memory."
BATCH, FITS = 128, 8


class Small(nn.Module):
    """A model with BatchNorm that fails where there are more rows than fit."""

    def __init__(self, fails: Callable[[int], BaseException | None]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
        self.fails = fails
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        error = self.fails(len(x))
        if error is not None:
            raise error
        out: Tensor = self.body(x)
        return out


def above(limit: int) -> Callable[[int], BaseException | None]:
    return lambda size: RuntimeError(FULL) if size > limit else None


def step(model: nn.Module, observe: Callable[[Any, Any], None] | None = None) -> Tensor:
    engine = Engine(model, nn.CrossEntropyLoss(), micro_batch=BATCH)
    return engine.backward(*batch(), observe=observe)


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 3, generator=draw, dtype=torch.float64)
    return x, torch.randint(5, (BATCH,), generator=draw)


def small(fails: Callable[[int], BaseException | None]) -> Small:
    torch.manual_seed(0)
    return Small(fails).double()


def test_it_gets_smaller_until_it_fits_and_the_batch_does_not() -> None:
    """We differ: accelerate's training goes on with a batch of 8 or less, ours with all 128."""
    tried: list[int] = []

    # Each try empties the garbage first, which is most of what this test takes.
    @find_executable_batch_size(starting_batch_size=BATCH, reduce_batch_size_fn=lambda: FITS)
    def training(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > FITS:
            raise RuntimeError(FULL)
        return batch_size

    assert training() <= FITS
    assert tried == [BATCH, FITS]

    model = small(above(FITS))
    observed: list[int] = []
    loss = step(model, lambda out, _: observed.append(len(out)))
    # Looks at each of 64, 32, 16 and 8 leave nothing on the model.
    assert model.sizes == [BATCH, *[FITS] * (BATCH // FITS)]
    assert observed == [FITS] * (BATCH // FITS)  # each row once
    want = undivided(small(above(BATCH)), nn.CrossEntropyLoss(), *batch())
    got = {"loss": loss} | {n: want[n] for n in want if n != "loss"}
    got |= {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    got |= {f"{n} (buffer)": b for n, b in model.named_buffers()}
    assert_exact(got, want)


def test_where_nothing_fits_that_is_said_and_nothing_has_changed() -> None:
    @find_executable_batch_size(starting_batch_size=1)
    def training(batch_size: int) -> None:
        raise RuntimeError(FULL)

    with pytest.raises(RuntimeError, match="No executable batch size found"):
        training()
    model = small(above(0))
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=FULL):
        step(model)
    assert same(snapshot(model), before)


def test_any_other_error_goes_through_at_once() -> None:
    error = ValueError("Oops, we had an error!")

    @find_executable_batch_size(starting_batch_size=16)
    def training(batch_size: int) -> None:
        raise error

    model = small(lambda _: error)
    for run in (training, lambda: step(model)):
        with pytest.raises(ValueError, match="Oops, we had an error!"):
            run()
    assert model.sizes == [BATCH]


def test_a_start_of_zero_is_refused() -> None:
    with pytest.raises(RuntimeError, match="No executable batch size found"):
        find_executable_batch_size(lambda batch_size: None, starting_batch_size=0)()
    with pytest.raises(ValueError, match="micro_batch must be a whole number >= 1, and it is 0"):
        Engine(small(above(0)), nn.CrossEntropyLoss(), micro_batch=0)


MESSAGES = {
    "CUDA out of memory. Tried to allocate 2.00 GiB.": True,
    "MPS backend out of memory (MPS allocated: 1.00 GB)": True,
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried": True,
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.": False,
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed": False,
}
"""What their finders know, and whether we make a step again for it."""


@pytest.mark.parametrize("words", MESSAGES)
def test_the_words_that_finders_know(words: str) -> None:
    """We differ in two: what cuDNN cannot do is a fault to be seen, and Gaudi was never tried."""
    error = RuntimeError(words)
    assert should_reduce_batch_size(error) or is_oom_error(error)
    assert out_of_memory(error) == MESSAGES[words]


class Limited(Net):
    """Runs out of memory above 8 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = FITS
        self.sizes: list[int] = []

    def lose(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.sizes.append(len(x))
        if len(x) > self.limit:
            raise RuntimeError(FULL)
        return super().lose(x, y)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*")
def test_a_trainer_that_runs_out_of_memory_trains_as_if_it_had_not() -> None:
    """We differ: Lightning's finder writes a smaller batch_size into the module."""
    plain, ours = made(Limited), made(Limited)
    plain.limit = N
    loader = DataLoader(rows(), batch_size=N)
    one = fit(plain, loader=loader)
    other = fit(ours, FullBatch(micro_batch=N), loader=loader)
    assert ours.sizes[0] == N
    assert min(ours.sizes) <= FITS
    for mine, theirs in zip(other.after, one.after, strict=True):
        assert_exact(mine, theirs)
