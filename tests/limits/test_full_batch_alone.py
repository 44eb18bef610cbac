"""A batch that fits undivided is foreseen alone: at once, exactly, and anew where it must be."""

from __future__ import annotations

import pytest
import torch
from benchmarks.guide.values.networks import WAYS, Values, batch
from tests.oracle import assert_exact, state_of, undivided
from tests.peaks import metered
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine, Plan
from anybatch.errors import NotExactError

FITS = "a dry run of the full batch, which fits"
IN_PROPORTION = "measured steps of few samples, in proportion, and a tenth"

KIB = 1024


def net(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(64) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(16, 64), layer, nn.Linear(64, 4)).double()


def rows(size: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(size)
    x = torch.randn(size, 16, generator=draw, dtype=torch.float64)
    return x, torch.randint(4, (size,), generator=draw)


def exact_step(model: nn.Module, engine: Engine, size: int) -> Plan:
    """Take a step, compare it, and return its plan; its bytes are at most those foreseen."""
    x, y = rows(size)
    model.zero_grad()
    wanted = undivided(model, F.cross_entropy, x, y)
    loss = engine.backward(x, y)
    assert_exact(state_of(model, loss), wanted)
    assert isinstance(engine.plan, Plan)
    assert engine.last is not None
    assert engine.plan.memory is not None
    if engine.last.peak_bytes is not None:
        assert engine.last.peak_bytes <= engine.plan.memory.predicted <= engine.plan.memory.budget
    return engine.plan


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_batch_that_fits_is_planned_by_its_full_batch(name: str, *, norm: bool) -> None:
    model = net(norm=norm)
    optimizer = getattr(torch.optim, name)(model.parameters())
    engine = Engine(model, F.cross_entropy, optimizer=optimizer, memory="64MiB", cache=None)
    found = exact_step(model, engine, 96).memory
    assert found is not None
    assert engine.last is not None
    assert (found.how, found.floor) == (FITS, None)
    assert found.undivided == found.predicted
    assert engine.last.peak_bytes is not None
    assert found.predicted <= 1.02 * engine.last.peak_bytes + (name == "Adam") * found.predicted
    model.zero_grad()
    told = engine.foresee(*rows(96)).memory  # who asks for a plan is told of all sizes
    assert told is not None
    assert told.floor is not None
    assert told.floor < told.undivided
    assert abs(told.undivided - found.predicted) <= 0.02 * found.predicted


def test_a_larger_batch_is_planned_anew_and_a_smaller_one_is_not() -> None:
    model = net()
    engine = Engine(model, F.cross_entropy, memory=1400 * KIB, cache=None)
    assert exact_step(model, engine, 256).memory.how == FITS  # type: ignore[union-attr]
    assert exact_step(model, engine, 7).mechanism == "undivided"
    larger = exact_step(model, engine, 4096)
    assert larger.mechanism != "undivided"
    assert larger.memory is not None
    assert larger.memory.floor is not None
    assert exact_step(model, engine, 4096).mechanism != "undivided"


def test_gradients_that_are_there_may_take_what_the_full_batch_needs() -> None:
    """They are set aside during a step, and 21 MiB less are left."""
    model = nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Linear(1024, 2600)).double()
    x, y = torch.randn(64, 16).double(), torch.randint(2600, (64,))
    engine = Engine(model, F.cross_entropy, memory="50MiB", cache=None)
    engine.backward(x, y)
    assert engine.plan.memory.how == FITS  # type: ignore[union-attr]
    try:
        engine.backward(x, y)
    except anybatch.errors.BudgetError:
        return  # a refusal names the bytes
    assert engine.last is not None
    assert (engine.last.predicted_bytes or 0) <= 50 * KIB * KIB


def test_a_plan_of_the_full_batch_is_printed_kept_and_obeyed() -> None:
    model = net()
    plan = exact_step(model, Engine(model, F.cross_entropy, memory="64MiB", cache=None), 96)
    assert FITS in str(plan)
    assert "floor" not in str(plan)
    assert "floor" not in plan._repr_html_()
    again = Plan.from_json(plan.to_json())
    assert again == plan
    obeying = Engine(model, F.cross_entropy, plan=again)
    assert exact_step(model, obeying, 96).memory == plan.memory


def test_a_division_that_is_asked_for_is_foreseen() -> None:
    model = net()
    engine = Engine(model, F.cross_entropy, memory="64MiB", micro_batch=16, cache=None)
    found = exact_step(model, engine, 96).memory
    assert found is not None
    assert found.floor is not None


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_a_guess_that_was_too_low_stops_at_the_budget_and_is_not_forgotten(way: object) -> None:
    """The first rows route few tokens, and all others many: one sample tells too little."""
    torch.manual_seed(0)
    model = Values(way).double()  # type: ignore[arg-type]
    x, y = batch(0.6, 0)
    few, _ = batch(0.02, 1)
    x = torch.cat([few[:4], x[4:]])
    budget = 1400 * KIB
    engine = Engine(model, F.cross_entropy, memory=budget, cache=None)
    for number in range(3):
        model.zero_grad()
        wanted = undivided(model, F.cross_entropy, x, y)
        with metered({"parameters": model.parameters()}) as meter:
            loss = engine.backward(x, y)
        assert_exact(state_of(model, loss), wanted)
        one = 600 * KIB  # the result of a kernel, after which a step is stopped
        assert meter.peak <= budget + one * (number == 0)
    assert engine.plan is not None
    assert engine.plan.mechanism != "undivided"


class HoldsMore(nn.Module):
    """Holds rows that fakes do not show, as a kernel's own memory is not shown."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        if type(x) is Tensor:
            wide = x.repeat(1, 256)
            out = out + (0 * wide).sum(1, keepdim=True)
        return out


def test_fakes_that_tell_too_little_cost_a_part_of_a_step() -> None:
    """The full batch holds 2 MiB; it is stopped, and the step is run in smaller micro-batches."""
    model = HoldsMore().double()
    x, y = rows(64)
    engine = Engine(model, F.cross_entropy, memory=1400 * KIB, cache=None)
    for number in range(3):
        model.zero_grad()
        wanted = undivided(model, F.cross_entropy, x, y)
        loss = engine.backward(x, y)
        assert_exact(state_of(model, loss), wanted)
        assert engine.last is not None
        assert engine.last.micro_batch < 64
        assert (engine.last.retries > 0) == (number == 0)


class Counts(nn.Module):
    """Samples meet, and it holds more real bytes than fakes tell: a value decides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.repeat(1, int(x.abs().max().item()))
        return self.inner(x - x.mean(0)) + wide.sum(1, keepdim=True)


def test_samples_that_meet_fit_undivided_or_are_refused() -> None:
    model = Counts().double()
    x, y = rows(32)
    x[20, 3] = 400.0  # no sample of those that were tried has such a value
    engine = Engine(model, F.cross_entropy, memory=1 << 20, cache=None)
    wanted = undivided(model, F.cross_entropy, x[:20], y[:20])
    loss = engine.backward(x[:20], y[:20])
    assert_exact(state_of(model, loss), wanted)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.plan.memory.how == IN_PROPORTION
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises((NotExactError, anybatch.errors.BudgetError)):
        engine.backward(x, y)
    assert all(
        a.equal(b.grad)
        for a, b in zip(before, model.parameters(), strict=True)
        if b.grad is not None
    )


class Bags(nn.Module):
    """Tokens in a sparse table, each through wide layers, with dense gradients of its own."""

    def __init__(self, entries: int, *, wide: int = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(entries, 64, sparse=True)
        self.wide = nn.Sequential(nn.Linear(64, wide), nn.GELU(), nn.Linear(wide, 64))
        self.head = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        each = self.table(x)
        return self.head((self.wide(each) if self.wide[0].out_features else each).mean(1))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("entries", "wide"), [(20_000, 0), (50, 0), (3000, 256)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_sparse_gradients_are_in_the_forecast(entries: int, wide: int, share: float) -> None:
    """Their sums grow with the batch; fakes, and steps of few samples, show nothing of it."""
    torch.manual_seed(0)
    model = Bags(entries, wide=wide)
    x, y = torch.randint(entries, (64, 16)), torch.randint(16, (64,))
    found = anybatch.plan(model, F.cross_entropy, (x, y), memory="1GiB", timed=False).memory
    assert found is not None
    assert found.floor is not None
    budget = int(found.floor + share * max(0, found.undivided - found.floor))
    engine = Engine(model, F.cross_entropy, memory=budget, cache=None)
    for _ in range(3):
        model.zero_grad()
        engine.backward(x, y)
        assert engine.last is not None
        assert engine.last.predicted_bytes is not None
        if engine.last.peak_bytes is not None:
            assert engine.last.peak_bytes <= engine.last.predicted_bytes <= budget
        x = torch.randint(entries, (64, 16))


class Graph(nn.Module):
    """Features of nodes, mixed by the edges in a sparse matrix."""

    def __init__(self, layout: torch.layout, *, buffer: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 3)
        edges = (torch.rand(64, 64) > 0.6).double().to_sparse(layout=layout)
        self.edges: Tensor
        if buffer:
            self.register_buffer("edges", edges)
        else:
            self.edges = edges

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.edges @ self.first(x).T).T.tanh())


MATRICES = [
    (torch.sparse_coo, True),
    (torch.sparse_coo, False),
    (torch.sparse_csr, True),
    (torch.sparse_csr, False),
    (torch.sparse_csc, False),
    pytest.param(
        *(torch.sparse_csc, True),
        marks=pytest.mark.xfail(strict=True, reason="the floor of one by columns is too low"),
    ),
]


@pytest.mark.large(few=2)
@pytest.mark.parametrize(("layout", "buffer"), MATRICES)
@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Sparse invariant checks:UserWarning")
def test_a_sparse_matrix_of_a_model_is_in_the_forecast(
    layout: torch.layout, *, buffer: bool
) -> None:
    """Fakes have none of its entries, and its transpose is a copy in backward."""
    torch.manual_seed(0)
    net = Graph(layout, buffer=buffer).double()
    x, y = torch.randn(256, 6).double(), torch.randint(3, (256,))
    loss = F.cross_entropy(net(x), y)  # torch cannot copy such a net
    loss.backward()  # type: ignore[no-untyped-call]
    wanted = {name: value.clone() for name, value in state_of(net, loss).items()}
    net.zero_grad()
    found = anybatch.plan(net, F.cross_entropy, (x, y), memory="1GiB", timed=False).memory
    assert found is not None
    assert found.floor is not None
    for share in (0.0, 0.3, 1.0):
        budget = int(found.floor + share * max(0, found.undivided - found.floor))
        engine = Engine(net, F.cross_entropy, memory=budget, cache=None)
        for _ in range(3):
            net.zero_grad()
            assert_exact(state_of(net, engine.backward(x, y)), wanted)
            assert engine.last is not None
            assert engine.last.predicted_bytes is not None
            if engine.last.peak_bytes is not None:
                assert engine.last.peak_bytes <= engine.last.predicted_bytes <= budget
