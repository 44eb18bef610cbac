"""What was shown for one size of batch is compared again for another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from tests.unit.execution.proof.nets import Body, Net, batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from anybatch import Engine, LazyBatch
from anybatch.errors import NotExactError
from anybatch.execution.proof.inspected import FREE, LARGER, REPEATED, ComparedSizes


class Ghosts(nn.Module):
    """Batch normalisation of 8 samples at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([self.norm(part) for part in h.split(8)])


COUNTING: dict[str, tuple[Callable[[], Body], tuple[int, ...]]] = {
    "ghost batches of 8": (Ghosts, (6, 8, 16)),
    "a branch above 8": (lambda: lambda h: h * 2 if len(h) > 8 else h, (6, 16)),
    "a factor above 8": (lambda: lambda h: h * (2.0 if len(h) > 8 else 1.0), (6, 16)),
    "a branch at 12 alone": (lambda: lambda h: h.relu() if len(h) == 12 else h, (16, 12)),
}


@pytest.mark.parametrize("name", COUNTING)
def test_a_later_batch_of_another_size_is_compared_before_it_computes(name: str) -> None:
    make, sizes = COUNTING[name]
    net = Net(make()).double()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    for n in sizes[:-1]:
        x, y = batch(n)
        net.zero_grad()
        want = undivided(net, F.cross_entropy, x, y)
        assert_exact(state_of(net, engine.backward(x, y)), want)
    net.zero_grad()
    with pytest.raises(NotExactError, match=f"for {sizes[-1]} samples"):
        engine.backward(*batch(sizes[-1]))
    assert all(p.grad is None for p in net.parameters())
    with pytest.raises(NotExactError, match=f"for {sizes[-1]} samples"):
        engine.backward(*batch(sizes[-1]))


class Asks(nn.Module):
    """Ask how many samples there are, and compute the same for any number."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h.reshape(len(h), -1))


@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 8)])
def test_the_evidence_is_of_the_step_that_compared_last(norm: Callable[[], nn.Module]) -> None:
    net = Net(Asks(norm())).double()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    steps = []
    for n in (6, 6, 16, 6, 16, 7):
        x, y = batch(n)
        net.zero_grad()
        want = undivided(net, F.cross_entropy, x, y)
        assert_exact(state_of(net, engine.backward(x, y)), want)
        assert engine.plan is not None
        assert engine.plan.exact
        steps.append(engine.plan.exact.step)
    assert steps == [1, 1, 3, 3, 3, 6]


def test_sizes_that_vary_are_not_compared_in_every_step() -> None:
    recorded = ComparedSizes(counts=True)
    for n in range(10, 10 + LARGER):
        assert recorded.new(n, 4)
        recorded.add(n, 4, n)
    most = 9 + LARGER
    assert not recorded.new(most + 1, 4)
    assert recorded.beyond(most + 1, 4)
    assert recorded.new(2 * most, 4)
    assert recorded.new(most, 8)
    assert not recorded.new(9, 4)
    assert recorded.beyond(9, 4)
    assert recorded.new(5, 4)
    assert not recorded.beyond(12, 4)
    assert len(recorded.pairs) > FREE
    assert not ComparedSizes(counts=False).new(5, 4)


ONE: dict[str, Body] = {
    "a branch": lambda h: h * 2 if len(h) > 1 else h,
    "a factor": lambda h: h * (1.0 + (len(h) > 1)),
    "a function": lambda h: h.relu() if h.shape[0] > 1 else h,
}


@pytest.mark.product
@pytest.mark.parametrize(("n", "micro_batch"), [(6, 1), (7, 2), (7, 3), (8, 3)])
@pytest.mark.parametrize("name", ONE)
def test_a_micro_batch_of_one_sample_that_is_computed_otherwise_leaves_a_doubt(
    name: str, n: int, micro_batch: int
) -> None:
    net, (x, y) = Net(ONE[name]).double(), batch(n)
    engine = Engine(net, F.cross_entropy, micro_batch=micro_batch)
    engine.backward(x, y)
    assert engine.plan is not None
    single = micro_batch == 1 or n % micro_batch == 1
    assert bool(engine.plan.exact) is not single
    assert ("one sample may be computed otherwise" in str(engine.plan.exact)) is single


class Standardised(nn.Module):
    """Normalise the rows of a weight by batch_norm, as one row of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, h: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight[None], None, None, training=True)[0]
        return h.reshape(len(h), -1) @ weight


def each(h: Tensor) -> Tensor:
    """Normalise halves of each sample, all of them in one row of channels."""
    n = len(h)
    return F.batch_norm(h.reshape(1, n * 2, 4), None, None, training=True).reshape(n, 8)


ROWS: dict[str, Callable[[], Body]] = {"a weight": Standardised, "each sample": lambda: each}


@pytest.mark.product
@pytest.mark.parametrize(("n", "micro_batch"), [(6, 1), (7, 2), (7, 3), (8, 3)])
@pytest.mark.parametrize("name", ROWS)
def test_one_row_of_channels_is_by_itself_for_one_sample_too(
    name: str, n: int, micro_batch: int
) -> None:
    net, (x, y) = Net(ROWS[name]()).double(), batch(n)
    engine = Engine(net, F.cross_entropy, micro_batch=micro_batch)
    want = undivided(net, F.cross_entropy, x, y)
    assert_exact(state_of(net, engine.backward(x, y)), want)
    assert engine.plan is not None
    assert engine.plan.exact, str(engine.plan.exact)


class Positions(nn.Module):
    """Add where each pixel is, along one dimension of images [n, 4, H, W]."""

    def __init__(self, dim: int, step: float) -> None:
        super().__init__()
        self.first, self.last, self.dim, self.step = nn.Conv2d(2, 4, 1), nn.Linear(4, 3), dim, step

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        n, _, height, width = h.shape
        mask = ~torch.zeros(n, height, width, dtype=torch.bool)
        places = torch.div(mask.cumsum(self.dim), self.step, rounding_mode="floor")
        return self.last((h * (1 + places[:, None])).relu().mean((2, 3)))


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("n", [7, 8, 16])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_an_image_as_high_as_the_batch_is_long_is_no_row(
    dim: int, n: int, micro_batch: int
) -> None:
    net = Positions(dim, 8.0 if dim == 0 else 3.0).double()
    x, y = torch.randn(n, 2, n, 8, dtype=torch.float64), torch.randint(0, 3, (n,))
    engine = Engine(net, F.cross_entropy, micro_batch=micro_batch)
    want = undivided(net, F.cross_entropy, x, y)
    try:
        loss = engine.backward(x, y)
    except NotExactError:
        assert dim == 0
        return
    assert engine.plan is not None
    assert bool(engine.plan.exact) is (dim > 0), str(engine.plan.exact)
    if dim > 0:
        assert_exact(state_of(net, loss), want)


LONG: dict[str, Callable[[Tensor], Tensor]] = {
    "a branch": lambda h: h * 2 if len(h) > 8 and h.shape[1] > 6 else h,
    "a factor": lambda h: h * (2.0 if len(h) * h.shape[1] > 100 else 1.0),
    "a function": lambda h: h.relu() if h.numel() > 800 else h,
    "one number of rows": lambda h: h.sin() if h.shape[:2] == (16, 9) else h,
}


class Long(nn.Module):
    """A network of tokens, as many as a batch has."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.body = nn.Linear(6, 8), nn.Linear(8, 3), body

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x).tanh())).mean(1)


def tokens(length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(16, length, 6, dtype=torch.float64), torch.randint(3, (16,))


@pytest.mark.parametrize("micro_batch", [5, 4, 6])
@pytest.mark.parametrize("earlier", [1, FREE + 1])
@pytest.mark.parametrize("name", LONG)
def test_what_depends_on_rows_and_on_their_length_is_found_at_another_length(
    name: str, earlier: int, micro_batch: int
) -> None:
    """After the first lengths only longer ones are compared."""
    net = Long(LONG[name]).double()
    engine = Engine(net, F.cross_entropy, micro_batch=5)
    for number in range(earlier):
        x, y = tokens(1 + number % 5)
        net.zero_grad()
        want = undivided(net, F.cross_entropy, x, y)
        assert_exact(state_of(net, engine.backward(x, y)), want)
    net.zero_grad()
    engine.micro_batch = micro_batch
    with pytest.raises(NotExactError, match="for 16"):
        engine.backward(*tokens(9))
    assert all(p.grad is None for p in net.parameters())


def rolled(h: Tensor, order: tuple[int, int, int]) -> Tensor:
    """Return `h` plus itself one place further on; the order is its own inverse."""
    return h + h.permute(order).roll(1, 1).permute(order)


BY_LENGTH: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean": lambda h: h - h.mean(0 if h.shape[1] > 8 else 1, keepdim=True),
    "softmax": lambda h: h * h.softmax(0 if h.shape[1] > 8 else 1),
    "a flip": lambda h: h + h.flip(0 if h.shape[1] > 8 else 1),
    "a running sum": lambda h: h + h.cumsum(0 if h.shape[1] > 8 else 1),
    "dimensions in another order": lambda h: rolled(h, (1, 0, 2) if h.shape[1] > 8 else (0, 1, 2)),
    "without a graph": lambda h: h * h.detach().mean(0 if h.shape[1] > 8 else 1, keepdim=True),
    "another function": lambda h: (
        h * (h.detach().amax(0, keepdim=True) if h.shape[1] > 8 else h.detach().tanh())
    ),
    "an index": lambda h: h + (h.detach()[[0]] if h.shape[1] > 8 else h.detach()[:, [0]]),
    "all of them": lambda h: (
        h * (h.detach().mean() if h.shape[1] > 8 else h.detach().mean(1, True))
    ),
    "a sorted copy": lambda h: h + h.detach().sort(0 if h.shape[1] > 8 else 1)[0],
}


@pytest.mark.parametrize("lengths", [(4, 6, 9), (9, 4), (4, 9, 4, 9)])
@pytest.mark.parametrize("name", BY_LENGTH)
def test_samples_that_meet_at_some_lengths_are_found(name: str, lengths: tuple[int, ...]) -> None:
    """Rows of 9 tokens meet; the calls and their graph are those of shorter rows."""
    net = Long(BY_LENGTH[name]).double()
    engine = Engine(net, F.cross_entropy, micro_batch=5)
    for length in lengths:
        x, y = tokens(length)
        net.zero_grad()
        want = undivided(net, F.cross_entropy, x, y)
        if length == 9:
            with pytest.raises(NotExactError):
                engine.backward(x, y)
        else:
            assert_exact(state_of(net, engine.backward(x, y)), want)
            assert engine.plan is not None
            assert engine.plan.exact, str(engine.plan.exact)


FULLER = {
    "buckets": [(32, 4), (16, 8), (8, 16), (4, 32), (6, 16), (30, 4), (14, 8), (28, 4), (5, 32)],
    "two shapes": [(40, 4), (20, 8), (10, 16), (5, 32), (38, 4), (18, 8), (9, 16), (36, 4)],
}


@pytest.mark.parametrize("fuller", [(32, 32), (20, 16), (10, 32)])
@pytest.mark.parametrize("name", FULLER)
def test_many_elements_are_found_where_neither_rows_nor_their_length_is_new(
    name: str, fuller: tuple[int, int]
) -> None:
    net = Long(lambda h: h * (2.0 if len(h) * h.shape[1] > 200 else 1.0)).double()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    for n, length in [*FULLER[name], *FULLER[name][:4]]:
        x, y = torch.randn(n, length, 6).double(), torch.randint(3, (n,))
        net.zero_grad()
        want = undivided(net, F.cross_entropy, x, y)
        assert_exact(state_of(net, engine.backward(x, y)), want)
        assert engine.plan is not None
        assert engine.plan.exact, engine.plan.exact
    n, length = fuller
    with pytest.raises(NotExactError, match=f"for {n} samples"):
        engine.backward(torch.randn(n, length, 6).double(), torch.randint(3, (n,)))


@pytest.mark.parametrize("few", [6, 7])
def test_a_factor_of_few_samples_is_found_after_many_sizes(few: int) -> None:
    net = Net(lambda h: h * (2.0 if 4 < len(h) < 8 else 1.0)).double()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    for n in range(10, 23):
        engine.backward(*batch(n))
        assert engine.plan is not None
        assert engine.plan.exact, engine.plan.exact
    with pytest.raises(NotExactError, match=f"for {few} samples"):
        engine.backward(*batch(few))


def test_lengths_that_vary_are_not_compared_in_every_step() -> None:
    recorded = ComparedSizes(counts=True)
    for length in range(1, 1 + LARGER):
        assert recorded.new(16, 4, ((length, 6),))
        recorded.add(16, 4, length, ((length, 6),))
    assert not recorded.new(16, 4, ((LARGER, 6),))
    assert not recorded.new(16, 4, ((LARGER + 1, 6),))
    assert recorded.beyond(16, 4, ((LARGER + 1, 6),))
    assert recorded.new(16, 4, ((2 * LARGER, 6),))


def test_a_few_sizes_are_compared_again_after_an_inspection_of_the_same_model() -> None:
    earlier = ComparedSizes(counts=True)
    for n in range(10, 30):
        earlier.add(n, 4, n)
    recorded = ComparedSizes(counts=True).after(earlier)
    for n in range(10, 10 + REPEATED):
        assert recorded.new(n, 4)
        recorded.add(n, 4, n)
    assert not recorded.new(20, 4)
    assert not recorded.beyond(20, 4)
    assert recorded.new(30, 4)
    assert ComparedSizes(counts=True, backward=True).after(earlier).before == frozenset()


class Later(nn.Module):
    """Factor of many samples, which is 1 until nothing that a module holds says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.file: Path | None = None

    def forward(self, h: Tensor) -> Tensor:
        assert self.file is not None
        return h * (2.0 if self.file.exists() and len(h) > 5 else 1.0)


@pytest.mark.parametrize("micro_batch", [3, 4])
@pytest.mark.parametrize("sizes", [(8,), (8, 6, 12), (6, 7, 8, 9, 10, 11, 12)])
def test_an_inspection_of_a_later_step_finds_a_factor_of_larger_batches(
    sizes: tuple[int, ...], micro_batch: int, tmp_path: Path
) -> None:
    later = Later()
    later.file = tmp_path / "switch"
    net = Net(later).double()
    engine = Engine(net, F.cross_entropy, micro_batch=micro_batch)
    for step in range(9):
        x, y = batch(sizes[step % len(sizes)])
        net.zero_grad()
        want = undivided(net, F.cross_entropy, x, y)
        assert_exact(state_of(net, engine.backward(x, y)), want)
    later.file.touch()
    with pytest.raises(NotExactError, match="depends on how many|for .* samples"):
        engine.backward(*batch(sizes[-1]))


def test_loaded_rows_of_another_length_leave_a_doubt() -> None:
    """Their length is unknown until they are computed with."""
    net = Long(LONG["a branch"]).double()
    engine, shown = Engine(net, F.cross_entropy, micro_batch=5), []
    for length in (4, 4, 9):
        engine.backward(LazyBatch(TensorDataset(*tokens(length))))
        assert engine.plan is not None
        shown.append(str(engine.plan.exact))
    assert all(one.startswith("shown") for one in shown[:2])
    assert shown[2].startswith("not shown: rows were loaded of another length")
