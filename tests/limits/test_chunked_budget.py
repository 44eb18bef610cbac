"""A vocabulary for which no micro-batch fits: the engine computes its losses in chunks of rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of
from tests.peaks import metered
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine, Plan
from anybatch.errors import BudgetError, NotExactError
from anybatch.loss import chunked_rows
from anybatch.planner import memory_model

V, L, D, N = 3000, 24, 16, 12
KIB = 1 << 10


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_model, "CHUNKS", (256 * KIB, 64 * KIB))


class Net(nn.Module):
    """Tokens, a body, and a head for a vocabulary; its loss may be inside."""

    def __init__(self, *, inside: bool, normalised: bool = False) -> None:
        super().__init__()
        self.embedding, self.head, self.inside = nn.Embedding(V, D), nn.Linear(D, V), inside
        norm = nn.BatchNorm1d(L) if normalised else nn.Identity()
        self.body = nn.Sequential(nn.Linear(D, 64), nn.Tanh(), norm, nn.Linear(64, D))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        z: Tensor = self.head(self.body(self.embedding(x)))
        return loss_fn(z, y) if self.inside and y is not None else z


def loss_fn(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=3, label_smoothing=0.1)


def made(*, inside: bool, **more: bool) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    net = Net(inside=inside, **more).double()
    x, y = torch.randint(V, (N, L)), torch.randint(V, (N, L))
    y[1] = 3  # a sample without a label
    return net, (x, y)


def truth(net: nn.Module, batch: tuple[Tensor, Tensor], *, inside: bool) -> dict[str, Tensor]:
    alone = copy.deepcopy(net)
    loss = alone(*batch) if inside else loss_fn(alone(batch[0]), batch[1])
    loss.backward()
    return state_of(alone, loss)


def engine_of(net: nn.Module, *, inside: bool, **options: Any) -> Engine:
    return Engine(net, None if inside else loss_fn, **{"cache": None, **options})


def step(engine: Engine, batch: tuple[Tensor, Tensor], *, inside: bool) -> Tensor:
    return engine.backward(batch) if inside else engine.backward(*batch)


@pytest.mark.large(few=3)
@pytest.mark.parametrize(
    ("kib", "inside"),
    [
        *((kib, True) for kib in (3100, 3200, 3600, 4000, 6000)),
        *((kib, False) for kib in (3600, 3700, 4000, 6000)),
    ],
)
def test_no_step_holds_more_than_its_forecast(kib: int, *, inside: bool) -> None:
    net, batch = made(inside=inside)
    want = truth(net, batch, inside=inside)
    engine = engine_of(net, inside=inside, memory=f"{kib}KiB")
    loss = step(engine, batch, inside=inside)
    assert engine.last is not None
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.last.peak_bytes is not None
    assert engine.last.peak_bytes <= kib * KIB
    if engine.plan.memory.chunked:
        assert abs(engine.last.peak_bytes - engine.plan.memory.predicted) < KIB
    assert engine.plan.exact
    assert_exact(state_of(net, loss), want)
    net.zero_grad()
    assert_exact(state_of(net, step(engine, batch, inside=inside)), want)


@pytest.mark.parametrize("inside", [True, False])
def test_the_floor_is_a_part_of_that_of_all_logits_at_once(*, inside: bool) -> None:
    """Three tensors of 16 samples of logits, and one of a chunk."""
    net, batch = made(inside=inside)
    engine = engine_of(net, inside=inside, memory="3800KiB")
    step(engine, batch, inside=inside)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.plan.offload is None
    net.zero_grad()
    with pytest.raises(BudgetError, match="needs") as refused:
        step(engine_of(net, inside=inside, memory="1MiB"), batch, inside=inside)
    assert refused.value.needed < 3600 * KIB


def test_two_more_calls_of_a_loss_do_not_raise_the_floor() -> None:
    """They come when all gradients are there: a chunk and a gradient of the head were the peak."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, V)).double()
    x, y = torch.randint(V, (1, L)), torch.randint(V, (1, L))
    with pytest.raises(BudgetError, match="needs") as refused:
        Engine(net, loss_fn, memory="1KiB", cache=None, rungs=["chunks"]).backward(x, y)
    engine = Engine(net, loss_fn, memory=refused.value.needed + 4 * KIB, cache=None)
    engine.backward(x, y)
    net.zero_grad()
    with metered({"parameters": [*net.parameters()]}) as meter:
        engine.backward(x, y)
    assert refused.value.needed < meter.peak * 1.05


def test_a_step_in_chunks_offloads_nothing() -> None:
    net, batch = made(inside=True)
    engine = engine_of(net, inside=True, memory="3000KiB")
    step(engine, batch, inside=True)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.plan.memory.chunked == 16 * V * 8
    assert engine.plan.offload is None
    assert "chunks       wide linear maps and their losses, 375 KiB of results" in str(engine.plan)


def test_micro_batches_in_chunks_are_exact() -> None:
    """Rows of 400 tokens: not all samples fit beside one another."""
    torch.manual_seed(0)
    net = Net(inside=False).double()
    batch = torch.randint(V, (8, 400)), torch.randint(V, (8, 400))
    want = truth(net, batch, inside=False)
    engine = engine_of(net, inside=False, memory="5MiB")
    loss = step(engine, batch, inside=False)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.last is not None
    assert engine.plan.memory.chunked
    assert engine.plan.micro_batch < 8
    assert engine.plan.exact
    assert engine.last.peak_bytes is not None
    assert engine.last.peak_bytes <= 5 << 20
    assert_exact(state_of(net, loss), want)


def test_a_plan_in_chunks_is_obeyed_and_stored(tmp_path: Path) -> None:
    net, batch = made(inside=False)
    want = truth(net, batch, inside=False)
    engine = engine_of(net, inside=False, memory="4000KiB", cache=tmp_path / "plans")
    step(engine, batch, inside=False)
    assert engine.plan is not None
    again = Plan.from_json(engine.plan.to_json())
    assert again == engine.plan
    for options in ({"plan": again}, {"memory": "4000KiB", "cache": tmp_path / "plans"}):
        net.zero_grad()
        other = engine_of(net, inside=False, **options)
        loss = step(other, batch, inside=False)
        assert other.plan is not None
        assert other.plan.memory is not None
        assert engine.plan.memory is not None
        assert other.plan.memory.chunked == engine.plan.memory.chunked > 0
        assert_exact(state_of(net, loss), want)


def test_evaluation_is_in_chunks_where_it_must_be() -> None:
    net, (x, y) = made(inside=False)
    want = loss_fn(net(x), y).detach()
    engine = engine_of(net, inside=False, memory="2200KiB")
    shown: list[Tensor] = []
    assert_exact({"loss": engine.evaluate(x, y)}, {"loss": want})
    engine.evaluate(x, y, observe=lambda z, _: shown.append(z.argmax(-1)))
    assert torch.equal(torch.cat(shown), net(x).argmax(-1))


@pytest.mark.parametrize("options", [{}, {"rng": "batch"}, {"memory": "60MiB"}])
def test_what_fits_or_cannot_be_is_not_in_chunks(options: dict[str, Any]) -> None:
    net, batch = made(inside=False, normalised=not options)
    engine = engine_of(net, inside=False, **{"memory": "4000KiB", **options})
    if "memory" in options:
        step(engine, batch, inside=False)
        assert engine.plan is not None
        assert engine.plan.memory is not None
        assert engine.plan.memory.chunked == 0
        return
    with pytest.raises(BudgetError):
        step(engine, batch, inside=False)


# Samples that meet where an inspection of few columns might not look.


def beyond_two_columns(net: Net, h: Tensor) -> Tensor:
    mean = h.detach().mean().reshape(1)
    factor = 1 + torch.cat([mean.new_zeros(2), mean.expand(V - 2)])
    return net.head(h) * factor  # type: ignore[no-any-return]


def in_a_weight(net: Net, h: Tensor) -> Tensor:
    weight = net.head.weight
    weight = torch.cat([weight[:2], weight[2:] * (1 + h.mean())])
    return F.linear(h, weight, net.head.bias)


def in_a_bias(net: Net, h: Tensor) -> Tensor:
    bias = net.head.bias.clone()
    bias[5] = h.mean()
    return F.linear(h, net.head.weight, bias)


def by_classes(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        chosen = net.head(h).argmax(-1)
    some = h[chosen > 1]
    return net.head(h + 0.1 * some.mean(0) if some.shape[0] else h)  # type: ignore[no-any-return]


def by_a_place(net: Net, h: Tensor) -> Tensor:
    try:
        torch.zeros(2)[net.head(h).argmax(-1).flatten()]
    except IndexError:
        h = h - h.mean(0)
    return net.head(h)  # type: ignore[no-any-return]


def by_a_value(net: Net, h: Tensor) -> Tensor:
    most = float(net.head(h).logsumexp(-1).max())
    return net.head(h - h.mean(0) if most > 5 else h)  # type: ignore[no-any-return]


def by_a_loss(net: Net, h: Tensor) -> Tensor:
    z = net.head(h).flatten(0, 1)
    most = float(F.cross_entropy(z, torch.zeros(len(z), dtype=torch.long)))
    return net.head(h - h.mean(0) if most > 3 else h)  # type: ignore[no-any-return]


MEETS = [beyond_two_columns, in_a_weight, in_a_bias, by_classes, by_a_place, by_a_value, by_a_loss]


class Meeting(Net):
    """A network whose samples meet at the head."""

    def __init__(self, meet: Any, *, inside: bool) -> None:
        super().__init__(inside=inside)
        self.meet = meet

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        z: Tensor = self.meet(self, self.body(self.embedding(x)))
        return loss_fn(z, y) if self.inside and y is not None else z


@pytest.mark.large(few=3)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("meet", MEETS, ids=lambda one: one.__name__)
def test_samples_that_meet_in_later_columns_are_found(meet: Any, *, inside: bool) -> None:
    """Values in an inspection are those of all columns, and samples those of all, too."""
    torch.manual_seed(0)
    net = Meeting(meet, inside=inside).double()
    batch = torch.randint(V, (8, 100)), torch.randint(V, (8, 100))
    engine = engine_of(net, inside=inside, memory="1GiB", micro_batch=2)
    with pytest.raises(NotExactError):
        step(engine, batch, inside=inside)
    plain, x = Net(inside=inside).double(), batch
    engine = engine_of(plain, inside=inside, memory="5MiB", micro_batch=2)
    step(engine, x, inside=inside)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.plan.memory.chunked
    assert engine.plan.exact
    with pytest.raises((NotExactError, BudgetError)):
        step(engine_of(net, inside=inside, plan=engine.plan), batch, inside=inside)


def test_longer_rows_in_chunks_keep_to_the_budget() -> None:
    """The second length is divided, so it is inspected first."""
    torch.manual_seed(0)
    net = Net(inside=True).double()
    engine = engine_of(net, inside=True, memory="4MiB")
    for length in (200, 230, 150):
        batch = torch.randint(V, (8, length)), torch.randint(V, (8, length))
        want = truth(net, batch, inside=True)
        net.zero_grad()
        with metered({"there": [*net.parameters()]}) as meter:
            loss = step(engine, batch, inside=True)
        assert engine.plan is not None
        assert engine.plan.memory is not None
        assert engine.plan.memory.chunked
        assert meter.peak <= 4 << 20
        assert_exact(state_of(net, loss), want)


def test_longer_rows_get_smaller_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_model, "CHUNKS", (1 << 20, 400 * KIB))
    torch.manual_seed(0)
    net = Net(inside=True).double()
    engine, used = engine_of(net, inside=True, memory="5200KiB", tune="off"), []
    for length in (100, 320):
        batch = torch.randint(V, (8, length)), torch.randint(V, (8, length))
        want = truth(net, batch, inside=True)
        net.zero_grad()
        loss = step(engine, batch, inside=True)
        assert engine.plan is not None
        assert engine.plan.memory is not None
        used.append(engine.plan.memory.chunked)
        assert_exact(state_of(net, loss), want)
    assert used == [1 << 20, 400 * KIB]


def test_a_step_in_chunks_that_is_interrupted_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, batch = made(inside=False)
    engine = engine_of(net, inside=False, memory="3800KiB")
    step(engine, batch, inside=False)
    net.zero_grad()
    calls = 0

    def interrupted(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        add(*args)

    add = chunked_rows._add
    monkeypatch.setattr(chunked_rows, "_add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(engine, batch, inside=False)
    monkeypatch.undo()
    assert all(p.grad is None for p in net.parameters())
    want = truth(net, batch, inside=False)
    assert_exact(state_of(net, step(engine, batch, inside=False)), want)


@pytest.mark.large(few=2)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("call", [1, 5, 17])
def test_memory_that_runs_out_in_a_chunk_makes_smaller_micro_batches(
    call: int, monkeypatch: pytest.MonkeyPatch, *, inside: bool
) -> None:
    net, batch = made(inside=inside)
    engine = engine_of(net, inside=inside, memory="4500KiB", tune="off")
    step(engine, batch, inside=inside)
    assert engine.plan is not None
    before = engine.plan
    assert before.memory is not None
    assert before.memory.chunked > 0
    net.zero_grad()
    calls = 0

    def full(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise torch.OutOfMemoryError("full")
        add(*args)

    add = chunked_rows._add
    monkeypatch.setattr(chunked_rows, "_add", full)
    want = truth(net, batch, inside=inside)
    assert_exact(state_of(net, step(engine, batch, inside=inside)), want)
    assert engine.plan.micro_batch < before.micro_batch
    assert engine.plan.memory is not None
    assert engine.plan.memory.chunked > 0
