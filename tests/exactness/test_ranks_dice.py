"""Guide: with rng="batch" the ranks draw together what the undivided batch would.

Real processes on gloo, each with its shard and with dice of its own; rank 0's count. Loss,
gradients and buffers are those of one process with all samples and rank 0's seeds, in float64, and
so is where the generators of torch, Python and numpy stand afterwards, on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.exactness.test_dice import (
    NOISE,
    N,
    Noisy,
    Normed,
    assert_same,
    by_torch,
    coupled,
    seeded,
    trained,
)
from tests.exactness.test_ranks import SHARDS, shard
from tests.faults import in_backward
from tests.oracle import looks_here, state_of
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from anybatch import Engine, LazyBatch
from anybatch.devices import RNGState
from anybatch.errors import BudgetError, LockstepError

LOSSES = {"one pass": F.cross_entropy, "coupled": coupled}
MODELS = {"streaming": Noisy, "lanes": Normed}


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, Pool]]:
    with ranks(request.param, fresh=True) as found:
        yield request.param, found


def problem(variant: str, row: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The same in every process."""
    torch.manual_seed(0)
    make, inputs = NOISE[row]
    return MODELS[variant](make()), inputs(), torch.randint(3, (N,))


def other_rng(rank: int) -> None:
    """Leave rank 0's RNG states as they are, and move those of the others."""
    if rank:
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        torch.randn(1)


class Short:
    """A hook that runs out of memory at its second call, where it is to."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.calls = fails, 0

    def __call__(self, _: Tensor) -> None:
        with torch.enable_grad():  # which a backward is not run with
            if looks_here():
                return
        self.calls += 1
        if self.fails and self.calls == 2:
            raise RuntimeError("can't allocate memory")


def of_row(
    rank: int, size: int, variant: str, loss: str, row: str, form: str, micro: int, short: bool
) -> Any:
    """Train a row of the table for two steps, the second without the first three samples."""
    torch.set_default_dtype(torch.float64)
    model, x, y = problem(variant, row)
    sizes = SHARDS[size][form]
    left = max(range(size), key=lambda r: sizes[r])
    engines: dict[int, Engine] = {}
    retries: list[int] = []

    def step(copied: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        made = Engine(copied, LOSSES[loss], micro_batch=micro, rng="batch")
        engine = engines.setdefault(id(copied), made)
        now = tuple(n - (N - len(x)) * (r == left) for r, n in enumerate(sizes))
        other_rng(rank)
        hook = in_backward(copied.get_submodule("head"), Short(short and rank == left))
        found = engine.backward(shard(x, now, rank), shard(y, now, rank))
        hook.remove()
        retries.append(engine.last.retries if engine.last else 0)
        return found

    result = trained(step)(model, x, y)
    assert retries == [short and rank == left] * 2
    return result


WAYS = [
    ("streaming", "one pass", "uneven", 3),
    ("streaming", "coupled", "empty", 8),
    ("lanes", "one pass", "empty", 3),
    ("lanes", "coupled", "uneven", 22),
]


def assert_is_of_all(
    workers: Pool, row: str, variant: str, loss: str, form: str, micro: int, *, short: bool = False
) -> None:
    """Compare each rank with one process that has the full batch."""
    torch.set_default_dtype(torch.float64)
    try:
        model, x, y = problem(variant, row)
        want = by_torch(model, LOSSES[loss], x, y)
    finally:
        torch.set_default_dtype(torch.float32)
    found = workers.run(of_row, variant, loss, row, form, micro, short)
    for got in found:
        assert_same(got, want)
        assert all(torch.equal(got[0][name], found[0][0][name]) for name in got[0])


@pytest.mark.large(few=1)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(map(str, way[:3])))
@pytest.mark.parametrize("row", ["transformer layer, samples second", "coin of torch"])
def test_draws_are_those_of_the_batch_of_all_ranks(
    pool: tuple[int, Pool], row: str, way: tuple[str, str, str, int]
) -> None:
    assert_is_of_all(pool[1], row, *way)


def test_whatever_is_drawn(pool: tuple[int, Pool], counted: Callable[..., int]) -> None:
    """Of every row in every way one in 80, or all of them."""
    every = list(product(NOISE, WAYS))
    for row, way in random.Random(pool[0]).sample(every, counted(len(every), 80)):
        assert_is_of_all(pool[1], row, *way)


@pytest.mark.large(few=1)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(map(str, way[:3])))
def test_memory_that_runs_out_on_one_rank_changes_no_draw(
    pool: tuple[int, Pool], way: tuple[str, str, str, int]
) -> None:
    variant, loss, _, _ = way
    assert_is_of_all(pool[1], "checkpoint", variant, loss, "uneven", 3, short=True)


def test_all_engines_must_have_the_same_settings(pool: tuple[int, Pool]) -> None:
    for said in pool[1].run(unlike):
        assert (
            "rank 0 is at the beginning of a step; rank 1 is at the beginning of a step with"
            in said
        )


def unlike(rank: int, size: int) -> str:
    """Draw otherwise than rank 0."""
    engine = Engine(
        nn.Linear(2, 3), F.cross_entropy, micro_batch=2, rng="batch" if rank else "micro_batch"
    )
    try:
        engine.backward(torch.randn(4, 2), torch.randint(3, (4,)))
    except LockstepError as error:
        return str(error)
    return ""


class Odd(nn.Module):
    """Dropout, and what one rank does otherwise."""

    def __init__(self, what: str, rank: int) -> None:
        super().__init__()
        self.what, self.rank, self.calls = what, rank, 0

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.3)
        if self.rank == 1 and self.what == "draws more":
            x = x + torch.randn(())
        if self.rank == 1 and self.what == "fails" and torch.is_grad_enabled():
            x.register_hook(_fail)
        return x


def _fail(_: Tensor) -> None:
    raise ValueError("a fault")


def failing(rank: int, size: int, variant: str, what: str) -> Any:
    """Take a step that fails; return what was said, and whether the dice are as they were."""
    torch.manual_seed(0)
    model, x, y = MODELS[variant](Odd(what, rank)), torch.randn(8, 8), torch.randint(3, (8,))
    other_rng(rank)
    before = RNGState.now()
    sizes = (5, 3, 0, 0)[:size]
    engine = Engine(model, F.cross_entropy, micro_batch=2, rng="batch")
    try:
        engine.backward(shard(x, sizes, rank), shard(y, sizes, rank))
    except Exception as error:
        grads = [p.grad for p in model.parameters()]
        return str(error), RNGState.now().same_as(before) and grads == [None] * len(grads)
    return "", False


@pytest.mark.parametrize("variant", MODELS)
def test_every_rank_has_its_own_rng_state_back_after_a_step_that_failed(
    pool: tuple[int, Pool], variant: str
) -> None:
    for rank, (said, same) in enumerate(pool[1].run(failing, variant, "fails")):
        assert same
        assert said == "a fault" if rank == 1 else "rank 1: ValueError: a fault" in said


@pytest.mark.parametrize("variant", MODELS)
def test_ranks_that_draw_otherwise_are_refused(pool: tuple[int, Pool], variant: str) -> None:
    for said, same in pool[1].run(failing, variant, "draws more"):
        assert same
        assert "every rank must draw as often as the others, and rank 1 and rank 0 have" in said


class Jittered(nn.Module):
    """A loss that draws."""

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        """[n, 3], [n] -> []."""
        return F.cross_entropy(out + 0.3 * torch.randn(out.shape), y)


def several_steps(rank: int, size: int, variant: str, lazy: bool, shards: list[Any]) -> Any:
    """Evaluate, and take steps, with other shards each time; `size` 1 is torch alone."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, loss = MODELS[variant](nn.Dropout(0.4)), Jittered()
    x, y = torch.randn(N, 8), torch.randint(3, (N,))
    engine = Engine(model, loss, micro_batch=4, rng="batch")
    found = []
    for sizes in shards:
        seeded()
        other_rng(rank)
        own: Any = shard(x, sizes, rank), shard(y, sizes, rank)
        if lazy and size == 1:
            torch.randint(2**31, ())  # what seeds the loading
        elif lazy:
            own = (LazyBatch(TensorDataset(*own)),)
        with torch.no_grad():
            evaluated = loss(model(x), y) if size == 1 else engine.evaluate(*own)
        if lazy and size == 1:
            torch.randint(2**31, ())
        value = loss(model(x), y) if size == 1 else engine.backward(*own)
        if size == 1:
            value.backward()
        found.append(({"known": evaluated} | state_of(model, value), [RNGState.now()]))
    return found


@pytest.mark.product
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("variant", MODELS)
def test_ranks_learn_what_they_draw_when_they_have_samples(
    pool: tuple[int, Pool], variant: str, lazy: bool
) -> None:
    size, workers = pool
    none = (0,) * (size - 2)
    if lazy:  # a lazy batch holds a sample or more
        shards = [tuple(_spread(N, size, first)) for first in range(2)]
    else:
        shards = [(*none, *each) for each in [(N, 0), (3, N - 3)]]
    torch.manual_seed(0)
    try:
        want = several_steps(0, 1, variant, lazy, [(N,)] * 2)
    finally:
        torch.set_default_dtype(torch.float32)
    for got in workers.run(several_steps, variant, lazy, shards):
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)


def _spread(total: int, size: int, first: int) -> Iterator[int]:
    """Yield uneven shards, none of them empty."""
    for rank in range(size - 1):
        part = 1 + (rank + first) % 3
        total -= part
        yield part
    yield total


def budgeted(rank: int, size: int) -> Any:
    """Train on 4 samples, or on many, with a budget; return what was held, and what said."""
    n = 4 if rank else 400
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    x, y = torch.randn(n, 8), torch.randint(3, (n,))
    engine = Engine(model, F.cross_entropy, memory="512KiB", rng="batch")
    engine.backward(x, y)
    assert engine.last is not None
    assert engine.plan is not None
    assert engine.plan.memory is not None
    owners = dict(engine.plan.memory.owners)
    full = 4 * 64 * (400 + 4 * (size - 1))
    try:
        Engine(model, F.cross_entropy, memory=full, rng="batch").backward(x, y)
    except BudgetError as error:
        return engine.last, owners["a draw of the full batch"] >= full, str(error)
    return engine.last, owners["a draw of the full batch"] >= full, ""


def test_a_plan_counts_the_draw_of_all_ranks(pool: tuple[int, Pool]) -> None:
    for last, counted, said in pool[1].run(budgeted):
        assert last.peak_bytes <= last.predicted_bytes <= 512 * 1024
        assert counted
        assert "a draw of the full batch" in said
