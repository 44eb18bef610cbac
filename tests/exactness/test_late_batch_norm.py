"""A batch normalisation that a model begins to call in a later step is that of the full batch."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, same, snapshot, state_after, state_of, undivided
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.functional import batch_norm  # as a model may have imported it

import anybatch
from anybatch import Engine
from anybatch.errors import LockstepError, NotExactError

OWN = torch.batch_norm
N = 22
SHARDS = {2: (13, 9), 3: (15, 0, 7)}


@pytest.fixture(autouse=True)
def _puts_back() -> Iterator[None]:
    native = torch.native_batch_norm
    yield
    assert torch.batch_norm is OWN
    assert torch.native_batch_norm is native


def bare(h: Tensor) -> Tensor:
    return F.batch_norm(h, None, None, training=True)


def imported(h: Tensor) -> Tensor:
    return batch_norm(h, None, None, None, None, True)


def torchs(h: Tensor) -> Tensor:
    return torch.batch_norm(h, None, None, None, None, True, 0.1, 1e-5, False)


def swallowed(h: Tensor) -> Tensor:
    """Whatever fails is left out."""
    try:
        return bare(h)
    except Exception:
        return h


def gathered(h: Tensor) -> Tensor:
    others, _ = anybatch.gather_batch(h)
    return h - others.mean(0)


def coupled(h: Tensor) -> Tensor:
    spread: Tensor = anybatch.coupled(lambda h: h.std())(h)
    return h * spread


def one_row(h: Tensor) -> Tensor:
    """Each sample by itself, as one row of n * C channels."""
    n = len(h)
    return F.batch_norm(h.view(1, n * 2, 3), None, None, training=True).view(n, 6)


MEETS = {
    "bare": bare,
    "imported": imported,
    "torch's": torchs,
    "swallowed": swallowed,
    "all_gather": gathered,
    "coupled": coupled,
}


class Late(nn.Module):
    """Samples meet behind a switch; an attribute is kept over that, and dropped."""

    def __init__(self, meets: Any, *, norm: bool = False, late: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.meets, self.late, self.held = meets, late, None

    def forward(self, x: Tensor) -> Tensor:
        """[n, 5] -> [n, 3]."""
        h = self.norm(self.first(x))
        if self.late:
            self.held = h.tanh()
            h = self.meets(h)
            h = h + self.held
            self.held = None
        return self.last(h)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(N, 5).double(), torch.randint(3, (N,))


def made(meets: Any, **options: bool) -> Late:
    torch.manual_seed(1)
    return Late(meets, **options).double()


def centred(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("micro_batch", [1, 3, 8, 11])
@pytest.mark.parametrize("loss", [F.cross_entropy, centred])
@pytest.mark.parametrize("name", MEETS)
def test_the_step_begins_again_in_lanes(name: str, loss: Any, micro_batch: int) -> None:
    model, (x, y) = made(MEETS[name]), batch()
    engine = Engine(model, loss, micro_batch=micro_batch)
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.mechanism != "lockstep"
    if name == "swallowed" and micro_batch == 1:
        return  # torch's own error about a single value is swallowed
    for late in (True, False, True):
        model.late = late
        model.zero_grad()
        want = undivided(model, loss, x, y)
        assert_exact(state_of(model, engine.backward(x, y)), want)
        assert engine.plan.mechanism == "lockstep"


def unlisted() -> Iterator[int]:
    """Count; what a count() of itertools holds is compared, and a model looked at when it moves."""
    yield from itertools.count()


def counted(calls: Iterator[int]) -> None:
    """No list: every lane would have its own."""
    next(calls)


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 3, 8, 11])
@pytest.mark.parametrize("name", MEETS)
def test_a_model_in_lanes_that_meets_elsewhere_is_looked_at_again(
    name: str, micro_batch: int
) -> None:
    """An attribute kept over a place that no look had come to was that of another micro-batch."""
    model, (x, y) = made(MEETS[name], norm=True), batch()
    engine, calls = Engine(model, F.cross_entropy, micro_batch=micro_batch), unlisted()
    model.register_forward_hook(lambda *_: counted(calls))
    for late in (False, True, False, True):
        model.late = late
        model.zero_grad()
        want = undivided(model, F.cross_entropy, x, y)
        before = next(calls)
        assert_exact(state_of(model, engine.backward(x, y)), want)
    assert engine.last is not None
    assert next(calls) - before - 1 == engine.last.micro_batches, "both ways are known"


@pytest.mark.parametrize("name", ["all_gather", "coupled"])
def test_what_is_saved_over_a_gather_belongs_to_its_micro_batch(name: str) -> None:
    model, (x, y) = made(MEETS[name], late=True, norm=True), batch()
    got = state_after(model, lambda m: Engine(m, F.cross_entropy, micro_batch=4).backward(x, y))
    assert_exact(got, undivided(model, F.cross_entropy, x, y))


def test_evaluate_and_a_budget() -> None:
    model, (x, y) = made(bare).float(), batch()
    x = x.float()
    memory = anybatch.plan(made(bare, late=True).float(), F.cross_entropy, (x, y), memory="1GiB")
    assert memory.memory is not None
    budget = (memory.memory.floor + memory.memory.undivided) // 2
    engine = Engine(model, F.cross_entropy, memory=budget)
    for late in (False, True, False):
        model.late = late
        want = F.cross_entropy(model(x), y)
        assert torch.allclose(engine.evaluate(x, y), want, rtol=1e-5)
        assert torch.allclose(engine.backward(x, y), want, rtol=1e-5)
        assert engine.last is not None
        assert engine.last.peak_bytes is None or engine.last.peak_bytes <= budget


def test_a_kernel_called_by_its_name_is_refused_and_nothing_has_changed() -> None:
    def native(h: Tensor) -> Tensor:
        return torch.native_batch_norm(h, None, None, None, None, True, 0.1, 1e-5)[0]

    model, (x, y) = made(native), batch()
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    engine.backward(x, y)
    model.late, before = True, snapshot(model)
    for _ in range(2):
        with pytest.raises(NotExactError, match=r"native_batch_norm called in forward.*local"):
            engine.backward(x, y)
        assert same(before, snapshot(model))


def test_local_is_each_micro_batch_by_itself() -> None:
    model, (x, y) = made(bare), batch()
    engine = Engine(model, F.cross_entropy, micro_batch=4, batchnorm="local")
    engine.backward(x, y)
    model.late = True
    model.zero_grad()
    want = F.cross_entropy(torch.cat([model(x[i : i + 4]) for i in range(0, N, 4)]), y)
    assert torch.allclose(engine.backward(x, y), want)


def test_only_some_micro_batches_is_refused() -> None:
    def some(h: Tensor) -> Tensor:
        return bare(h) if bool((h.abs() > 1e3).any()) else h

    model, (x, y) = made(some, late=True), batch()
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    engine.backward(x, y)
    x[13] = 1e6
    before = snapshot(model)
    with pytest.raises(LockstepError, match="batch normalisation of 6 channels"):
        engine.backward(x, y)
    assert same(before, snapshot(model))


def test_an_ordinary_step_enters_no_mode_and_a_failed_one_leaves_nothing() -> None:
    class Asks(nn.Linear):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            stacks.append((_len_torch_function_stack(), _len_torch_dispatch_stack()))
            if self.fails:
                raise KeyError
            return super().forward(x)

    stacks: list[tuple[int, int]] = []
    (x, y), model = batch(), Asks(5, 3).double()
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    engine.backward(x, y)
    stacks.clear()
    engine.backward(x, y)
    assert stacks == [(0, 0)] * 6
    model.fails = True
    with pytest.raises(KeyError):
        engine.backward(x, y)
    assert torch.batch_norm is OWN


def test_a_step_in_another_thread_does_not_end_it() -> None:
    """And what is called there, outside of a step, is not heard."""
    (x, y), other = batch(), made(bare)
    within = Engine(other, F.cross_entropy, micro_batch=8)
    found: list[Tensor] = []

    def elsewhere() -> None:
        within.backward(x, y)
        found.append(bare(x))

    def meets(h: Tensor) -> Tensor:
        if not found:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        return bare(h)

    model = made(meets)
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    engine.backward(x, y)
    model.late = True
    model.zero_grad()
    want = undivided(made(bare, late=True), F.cross_entropy, x, y)
    assert_exact(state_of(model, engine.backward(x, y)), want)
    assert torch.equal(found[0], bare(x))


@pytest.mark.product
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")  # torch's own
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_compiled_once_and_traced(backend: str, norm: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    (x, y), model = batch(), made(bare, norm=norm)
    model.norm.eval()
    model.compile(backend=backend, fullgraph=True)
    engine = Engine(model, F.cross_entropy, micro_batch=11)
    model(x[:11])
    graphs = counters["stats"]["unique_graphs"]
    for _ in range(2):
        engine.backward(x, y)
    assert counters["stats"]["unique_graphs"] == graphs
    model.late = True
    model.zero_grad()
    if norm:
        with pytest.raises(NotExactError, match="torch.compile has compiled the model"):
            engine.backward(x, y)
        return
    want = undivided(made(bare, late=True), F.cross_entropy, x, y)
    assert_exact(state_of(model, engine.backward(x, y)), want)


@pytest.mark.parametrize("micro_batch", [1, 3, 8, 11])
def test_each_sample_by_itself_is_no_batch(micro_batch: int) -> None:
    """One row of n * C channels (AdaIN) was normalised with that of other lanes."""
    (x, y), model = batch(), made(one_row, late=True)
    engines = []

    def run(copied: nn.Module) -> Tensor:
        engines.append(Engine(copied, F.cross_entropy, micro_batch=micro_batch))
        return engines[-1].backward(x, y)

    assert_exact(state_after(model, run), undivided(model, F.cross_entropy, x, y))
    assert engines[0].plan.mechanism == "streaming"
    normed = made(one_row, late=True, norm=True)
    if 1 in (micro_batch, N % micro_batch):
        with pytest.raises(NotExactError, match="a micro-batch must have two samples at least"):
            run(normed)
        return
    assert_exact(state_after(normed, run), undivided(normed, F.cross_entropy, x, y))


@pytest.mark.parametrize("norm", [False, True])
def test_each_sample_by_itself_may_follow_later(norm: bool) -> None:
    (x, y), model = batch(), made(one_row, norm=norm)
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    for late in (False, True):
        model.late = late
        model.zero_grad()
        want = undivided(model, F.cross_entropy, x, y)
        assert_exact(state_of(model, engine.backward(x, y)), want)


def on_rank(rank: int, size: int, name: str, norm: bool, micro_batch: int) -> list[Any]:
    model, (x, y) = made(MEETS[name], norm=norm), batch()
    begin = sum(SHARDS[size][:rank])
    own = slice(begin, begin + SHARDS[size][rank])
    engine, found = Engine(model, F.cross_entropy, micro_batch=micro_batch), []
    for late in (False, True, False, True):
        model.late = late
        model.zero_grad()
        found.append(state_of(model, engine.backward(x[own], y[own])))
        assert torch.batch_norm is OWN
    return found


@pytest.fixture(scope="module", params=[2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with ranks(request.param) as found:
        yield found


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [3, 22])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", ["bare", "all_gather"])
def test_all_ranks_begin_again(pool: Pool, name: str, norm: bool, micro_batch: int) -> None:
    (x, y), model, want = batch(), made(MEETS[name], norm=norm), []
    for late in (False, True, False, True):
        model.late = late
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        want.append(state_of(model, loss.detach()))
    for found in pool.run(on_rank, name, norm, micro_batch):
        for got, one in zip(found, want, strict=True):
            assert_exact(got, one)
