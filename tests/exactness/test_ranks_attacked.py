"""What ranks may have different, or do at a bad moment: found by trying to break them.

Every case once gave wrong gradients without a word, ended a process from within gloo, or left the
ranks unable to make another step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.oracle import assert_exact, same, snapshot, state_after, state_of, undivided
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine, Loss
from anybatch.devices import Group, group_of
from anybatch.errors import RankError

SIZES = (8, 5)
N = sum(SIZES)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with ranks(2, fresh=True) as found:
        yield found


def model_of(variant: str = "stream", wide: int = 5) -> nn.Module:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(wide) if variant == "lanes" else nn.LayerNorm(wide)
    return nn.Sequential(nn.Linear(6, wide), norm, nn.Tanh(), nn.Linear(wide, 3)).double()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(9)
    return torch.randn(N, 6).double(), torch.randint(3, (N,))


def rows(rank: int) -> tuple[Tensor, Tensor]:
    begin = sum(SIZES[:rank])
    x, y = batch()
    return x[begin : begin + SIZES[rank]], y[begin : begin + SIZES[rank]]


def coupled(out: Tensor, y: Tensor) -> Tensor:
    return (out.T @ F.one_hot(y, 3).to(out.dtype)).square().mean()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "stream": F.cross_entropy,
    "lanes": F.cross_entropy,
    "coupled": coupled,
}


class Pair(nn.Module):
    """Two layers of one shape, registered in one order or the other."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = {"one": nn.Linear(6, 6), "two": nn.Linear(6, 6)}
        for name in sorted(layers, reverse=turned):
            self.add_module(name, layers[name])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """[n, 6] -> [n, 3]."""
        return self.two(self.one(x).tanh())[:, :3]


def unlike(rank: int, _size: int, what: str) -> str:
    """Step with ranks that differ in something, and return what is said."""
    (x, y), odd = rows(rank), rank == 1
    wide = 6 if what == "shape" and odd else 5
    model: Any = Pair(turned=odd) if what == "order" else model_of(wide=wide)
    options: dict[str, Any] = {}
    if what == "adaptive" and not odd:
        options["batchnorm"] = "adaptive"
    if what == "values" and odd:
        with torch.no_grad():
            model[0].bias[0] += 1e-12
    engine, other = (Engine(model, F.cross_entropy, micro_batch=3, **options) for _ in range(2))
    if what == "frozen":
        engine.backward(x, y)
        model[0].weight.requires_grad_(not odd)
    if what == "engines":
        engine.backward(x, y)
        other.backward(x, y)
        engine = other if odd else engine
    if what == "lazy":
        model = nn.Sequential(nn.LazyLinear(3).double())
        torch.manual_seed(rank)
        engine = Engine(model, F.cross_entropy, micro_batch=3)
        engine.backward(x, y)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if what == "scale" and odd else None
    before = snapshot(model)
    with pytest.raises(anybatch.errors.AnybatchError) as caught:
        engine.backward(x, y, scaler=scaler)
    assert same(snapshot(model), before)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.large(few=4)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("values", "RankError: all ranks must begin with the same parameters, and rank 1 "),
        ("lazy", "RankError: all ranks must begin with the same parameters, and rank 1 "),
        ("shape", "RankError: all ranks must train parameters of the same names"),
        ("order", "RankError: all ranks must train parameters of .*in the same order"),
        ("frozen", "RankError: all ranks must train parameters of .*the same of them frozen"),
        ("engines", "RankError: all ranks must step the same engines in the same order"),
        ("scale", "RankError: all ranks must scale gradients alike"),
        ("adaptive", 'RankError: all ranks must be given batchnorm="adaptive", or none .*rank 1'),
    ],
)
def test_ranks_that_are_not_alike_are_reported_before_anything_is_summed(
    pool: Pool, what: str, said: str
) -> None:
    for one in pool.run(unlike, what):
        assert pytest.RaisesExc(Exception, match=said).matches(Exception(one)), one
    for got in pool.run(well, "stream"):
        assert_exact(got, truth("stream"))


def truth(variant: str) -> dict[str, Tensor]:
    return undivided(model_of(variant), LOSSES[variant], *batch())


def engine_of(variant: str, model: nn.Module) -> Engine:
    return Engine(model, LOSSES[variant], micro_batch=3)


def well(rank: int, _size: int, variant: str) -> dict[str, Tensor]:
    return state_after(model_of(variant), lambda m: engine_of(variant, m).backward(*rows(rank)))


def starved(rank: int, _size: int, variant: str) -> Any:
    """Let memory run out on the last rank even for a single sample; then make a step."""
    model, (x, y) = model_of(variant), rows(rank)
    engine, before = engine_of(variant, model), snapshot(model)

    def fails(*_: Any) -> None:
        raise RuntimeError("can't allocate memory: 64 bytes")

    handle = model[0].register_forward_hook(fails) if rank == 1 else None
    with pytest.raises(RuntimeError) as caught:
        engine.backward(x, y)
    if handle is not None:
        handle.remove()
    assert same(snapshot(model), before)
    return str(caught.value), state_of(model, engine.backward(x, y))


@pytest.mark.parametrize("variant", LOSSES)
def test_memory_that_ran_out_elsewhere_is_not_mistaken_for_ones_own(
    pool: Pool, variant: str
) -> None:
    for rank, (said, got) in enumerate(pool.run(starved, variant)):
        assert said.startswith("can't" if rank else "all ranks must make a step, and 1 of 2 failed")
        assert_exact(got, truth(variant))


def interrupted(rank: int, _size: int, variant: str, at: int) -> Any:
    """Send Ctrl-C to rank 0 as it waits for the others for the n-th time; then make a step."""
    fresh, (x, y) = model_of(variant), rows(rank)
    model = model_of(variant)
    engine = engine_of(variant, model)
    for _ in range(2):
        engine.backward(x, y)
    model.load_state_dict(fresh.state_dict())
    model.zero_grad()
    before, wait, waits = snapshot(model), Group.wait, [0]

    def signalled(self: Group, work: Any) -> None:
        waits[0] += 1
        if waits[0] == at:
            os.kill(os.getpid(), signal.SIGINT)
        wait(self, work)

    if rank == 0:
        Group.wait = signalled  # type: ignore[method-assign]
    ended = "well"
    try:
        engine.backward(x, y)
    except (KeyboardInterrupt, RankError) as error:
        ended = type(error).__name__
    finally:
        Group.wait = wait  # type: ignore[method-assign]
    if ended == "RankError":
        assert same(snapshot(model), before)
    model.load_state_dict(fresh.state_dict())
    model.zero_grad()
    return ended, state_of(model, engine.backward(x, y))


@pytest.mark.large(few=2)
@pytest.mark.parametrize("variant", LOSSES)
def test_an_interrupt_while_a_rank_waits_leaves_all_able_to_go_on(pool: Pool, variant: str) -> None:
    ends, want = [], truth(variant)
    for at in range(1, 12):
        (one, mine), (other, its) = pool.run(interrupted, variant, at)
        ends.append((one, other))
        assert_exact(mine, want)
        assert_exact(its, want)
    assert ends[0] == ("KeyboardInterrupt", "RankError")
    assert ("KeyboardInterrupt", "well") in ends  # at the very end a step is made by all


class Phases(nn.Module):
    """Compares complex features with those of all samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        """[n, 6] -> [n]."""
        z = x.to(torch.complex128) @ self.weight
        others, _ = anybatch.gather_batch(z)
        return (z @ others.conj().T).abs().sum(1)


def phases(rank: int, _size: int) -> dict[str, Tensor]:
    loss = Loss.per_sample(torch.square)
    return state_after(Phases(), lambda m: Engine(m, loss, micro_batch=3).backward(rows(rank)[0]))


def test_complex_rows_that_are_gathered_over_ranks_get_their_full_gradient(pool: Pool) -> None:
    want = undivided(Phases(), lambda out: out.square().mean(), batch()[0], None)
    for got in pool.run(phases):
        assert_exact(got, want)


def unsendable(rank: int, _size: int) -> dict[str, Tensor]:
    """Give targets in a tree that cannot be sent, which every rank finds out by itself."""

    class Local(dict[str, Tensor]):
        pass

    model, (x, y) = model_of(), rows(rank)
    engine = Engine(model, lambda out, t: coupled(out, t["y"]), micro_batch=3)
    with pytest.raises((AttributeError, RankError), match="Local"):
        engine.backward(x, Local(y=y))
    return state_of(model, engine.backward(x, {"y": y}))


def test_what_cannot_be_sent_fails_before_the_others_wait_for_it(pool: Pool) -> None:
    for got in pool.run(unsendable):
        assert_exact(got, truth("coupled"))


def separate_groups(rank: int, _size: int) -> bool:
    one, other = (group_of(dist.new_group([0, 1])) for _ in range(2))
    one.begin()
    other.begin()
    dist.barrier()
    if rank == 0:
        one.abandon()
    dist.barrier()
    return one._reported() and not other._reported()


def test_a_group_that_is_broken_breaks_no_other(pool: Pool) -> None:
    assert pool.run(separate_groups) == [True, True]


def twice(rank: int, _size: int) -> str:
    """Press Ctrl-C twice on rank 0, which leaves at once and for good."""
    model, (x, y) = model_of(), rows(rank)
    engine, wait = engine_of("stream", model), Group.wait

    def signalled(self: Group, work: Any) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        wait(self, work)

    if rank == 0:
        Group.wait = signalled  # type: ignore[method-assign]
    try:
        with pytest.raises((KeyboardInterrupt, RankError)):
            engine.backward(x, y)
    finally:
        Group.wait = wait  # type: ignore[method-assign]
    assert model[0].weight.grad is None
    with pytest.raises(RankError) as caught:
        engine.backward(x, y)
    return str(caught.value)


def test_a_second_interrupt_does_not_wait(pool: Pool) -> None:  # last: it costs the pool
    mine, _ = pool.run(twice)
    assert "one was lost in an earlier step" in mine
