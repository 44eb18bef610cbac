"""README: a step happens on all ranks or on none, and a rank that is lost is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.faults import backward_without_data, in_backward
from tests.oracle import same, snapshot
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.distributed import buckets
from anybatch.errors import RankError
from anybatch.execution.gradients import Gradients

N = 12


@pytest.fixture(scope="module", params=[2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, Pool]]:
    with ranks(request.param, fresh=True) as found:
        yield request.param, found


def model_of(variant: str) -> nn.Module:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(5) if variant == "lanes" else nn.LayerNorm(5)
    return nn.Sequential(nn.Linear(6, 5), norm, nn.Tanh(), nn.Linear(5, 3)).double()


def coupled(out: Tensor, y: Tensor) -> Tensor:
    return (out.T @ F.one_hot(y, 3).double()).square().mean()


class Fails:
    """Raises when it is called for the n-th time, on one rank."""

    def __init__(self, at: int, error: Exception) -> None:
        self.at, self.error = at, error
        CALLS[0] = 0

    def __call__(self, *_: Any) -> None:
        if backward_without_data():
            return
        CALLS[0] += 1
        if CALLS[0] == self.at:
            raise self.error


CALLS = [0]
"""Not an attribute of the hook: each lane would have its own."""


def rows(rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7 + rank)
    return torch.randn(N + rank, 6).double(), torch.randint(3, (N + rank,))


ERRORS = {"fault": ValueError("a fault"), "memory": RuntimeError("can't allocate memory")}


def failing(
    rank: int, size: int, variant: str, loss: str, place: str, at: int, error: str, learned: bool
) -> Any:
    """Fail once on the last rank; then take a step, and return gradients and what was said."""
    model, (x, y) = model_of(variant), rows(rank)
    engine = Engine(model, coupled if loss == "coupled" else F.cross_entropy, micro_batch=4)
    if learned:
        engine.backward(x, y)
        model.zero_grad()
    before = snapshot(model)
    fails = Fails(at, ERRORS[error]) if rank == size - 1 else Fails(0, ValueError())
    if place == "forward":
        handle = model[2].register_forward_hook(fails)
    elif place == "first":
        handle = model[0].register_forward_hook(fails)
    else:
        handle = in_backward(model[0], fails)
    said = ""
    try:
        engine.backward(x, y)
    except Exception as caught:
        said = f"{type(caught).__name__}: {caught}"
        assert same(snapshot(model)["gradients"], before["gradients"])
        assert same(snapshot(model)["buffers"], before["buffers"])
        handle.remove()
        engine.backward(x, y)
    handle.remove()
    return said, [p.grad.clone() for p in model.parameters()]


def well(rank: int, size: int, variant: str, loss: str, learned: bool) -> Any:
    model, (x, y) = model_of(variant), rows(rank)
    engine = Engine(model, coupled if loss == "coupled" else F.cross_entropy, micro_batch=4)
    if learned:
        engine.backward(x, y)
        model.zero_grad()
    engine.backward(x, y)
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.large(few=3)
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("loss", ["parts", "coupled"])
@pytest.mark.parametrize("variant", ["lanes", "stream"])
@pytest.mark.parametrize(
    ("place", "at"), [("first", 1), ("first", 4), ("forward", 4), ("backward", 2)]
)
def test_a_fault_on_one_rank_is_one_on_all_and_the_next_step_is_whole(
    pool: tuple[int, Pool], variant: str, loss: str, place: str, at: int, learned: bool
) -> None:
    size, workers = pool
    want = workers.run(well, variant, loss, learned)
    found = workers.run(failing, variant, loss, place, at, "fault", learned)
    for rank, (said, got) in enumerate(found):
        if rank == size - 1:
            assert said == "ValueError: a fault"
        else:
            assert "1 of " in said
            assert f"rank {size - 1}: ValueError: a fault" in said
        assert all(map(torch.equal, got, want[rank]))


@pytest.mark.product
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("variant", "loss"), [("lanes", "parts"), ("stream", "coupled")])
@pytest.mark.parametrize(("place", "at"), [("first", 4), ("forward", 4), ("backward", 2)])
def test_memory_that_runs_out_on_one_rank_costs_a_smaller_step(
    pool: tuple[int, Pool], variant: str, loss: str, place: str, at: int, learned: bool
) -> None:
    _, workers = pool
    want = workers.run(well, variant, loss, learned)
    for rank, (said, got) in enumerate(
        workers.run(failing, variant, loss, place, at, "memory", learned)
    ):
        assert said == ""
        for a, b in zip(got, want[rank], strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def lost(rank: int, size: int, place: str) -> str:
    model, (x, y) = model_of("lanes"), rows(rank)
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    engine.backward(x, y)
    if rank == 1:
        where = model[2] if place == "forward" else model[0]
        where.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RankError) as caught:
        engine.backward(x, y)
    with pytest.raises(RankError, match="one was lost in an earlier step"):
        engine.backward(x, y)
    return str(caught.value)


LOST = [(2, "forward"), (4, "first"), (4, "forward"), (2, "first")]
"""Ranks, and where one is killed; the first two have each number and each place."""


def test_a_rank_that_is_killed_is_named_by_the_others(counted: Callable[[int], int]) -> None:
    for size, place in LOST[: max(2, counted(len(LOST)))]:
        with ranks(size, fresh=True) as workers:
            found = workers.each(lost, place)
        assert isinstance(found[1], EOFError)
        for rank in {*range(size)} - {1}:
            assert f"rank 1 of {size} is gone" in found[rank], found[rank]


def mismatched(rank: int, size: int, what: str) -> str:
    model, (x, y) = model_of("lanes"), rows(rank)
    if what == "path" and rank == 0:
        model[2] = nn.Sequential(nn.BatchNorm1d(5, affine=False).double(), nn.Tanh())
    if what == "parameters" and rank == 0:
        model.register_parameter("more", nn.Parameter(torch.zeros(2)))
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    step: Any = engine.evaluate if what == "evaluate" and rank == 0 else engine.backward
    if what == "samples":
        x, y = x[:0], y[:0]
    try:
        step(x, y)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


@pytest.mark.product
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("path", "LockstepError: .*rank 0 is at batch norm.*rank 1 is at"),
        ("parameters", "RankError: all ranks must train parameters of the same names"),
        ("evaluate", r"RankError: all ranks must make the same step.*rank 0: evaluate, rank 1: ba"),
        ("samples", "BatchError: .*no rank has any"),
    ],
)
def test_ranks_that_do_not_do_the_same_are_reported(
    pool: tuple[int, Pool], what: str, said: str
) -> None:
    _, workers = pool
    found = workers.run(mismatched, what)
    for one in found:
        assert pytest.RaisesExc(Exception, match=said).matches(Exception(one)), one
    assert workers.run(well, "lanes", "parts", False)


def checked(rank: int, _size: int) -> str:
    model, batch = model_of("lanes"), rows(rank)
    with pytest.raises(anybatch.errors.NotYetError) as caught:
        anybatch.check(model, F.cross_entropy, batch)
    return str(caught.value)


def test_a_check_is_for_one_process(pool: tuple[int, Pool]) -> None:
    _, workers = pool
    for said in workers.run(checked):
        assert "in one process, and there are several" in said


def late(rank: int, size: int, where: str) -> Any:
    """Fail on the last rank once gradients are being summed, or have been."""
    model, (x, y) = model_of("lanes"), rows(rank)
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    owner: Any = Gradients if where == "finish" else buckets
    real = getattr(owner, where)

    def fails(*arguments: Any) -> Any:
        if where == "finish":
            real(*arguments)
        raise ERRORS["memory"]

    before = snapshot(model)
    if rank == size - 1:
        setattr(owner, where, fails)
    try:
        with pytest.raises((RankError, RuntimeError)) as caught:
            engine.backward(x, y)
    finally:
        setattr(owner, where, real)
    assert same(snapshot(model)["gradients"], before["gradients"])
    assert same(snapshot(model)["buffers"], before["buffers"])
    if where == "finish":
        engine.backward(x, y)
    return str(caught.value), [p.grad for p in model.parameters()]


def test_memory_that_runs_out_at_the_end_of_a_step_ends_it_on_all_ranks(
    pool: tuple[int, Pool],
) -> None:
    size, workers = pool
    want = workers.run(well, "lanes", "parts", False)
    for rank, (said, got) in enumerate(workers.run(late, "finish")):
        assert "after the gradients had been summed" in said
        assert rank == size - 1 or f"rank {size - 1}: RankError" in said
        assert all(map(torch.equal, got, want[rank]))


def test_a_rank_that_leaves_in_the_middle_of_a_sum_ends_the_others_wait() -> None:
    with ranks(2, fresh=True) as workers:
        (said, got), (own, _) = workers.run(late, "dense")
    assert "all ranks must be alive until the step ends" in said
    assert "memory" in own
    assert got == [None] * len(got)
