"""Out of memory in a step costs one micro-batch, else one step; never a wrong or doubled update.

Faults are injected at every micro-batch, in forward and in backward, and raised for real by a limit
on the process. The truth is the undivided batch in float64.
"""

from __future__ import annotations

import copy
import gc
import os
import random
import subprocess
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from tests.faults import unwalked
from tests.oracle import assert_exact, same, snapshot
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from anybatch import Engine, LazyBatch, Loss
from anybatch.errors import NotExactError

BATCH, MICRO = 10, 4
ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    RuntimeError("could not create a primitive"),
    MemoryError(),
)


@dataclass
class Fault:
    """Counts calls, and raises at those for which `when(call, rows)` holds."""

    when: Callable[[int, int], bool] = lambda call, rows: False
    error: BaseException = field(default_factory=lambda: torch.OutOfMemoryError("full"))
    sizes: list[int] = field(default_factory=list)
    failed: bool = False

    def __call__(self, rows: int) -> None:
        self.sizes.append(rows)
        if self.when(len(self.sizes) - 1, rows):
            self.failed = True
            raise self.error


def at(call: int) -> Callable[[int, int], bool]:
    return lambda now, rows: now == call


def above(most: int) -> Callable[[int, int], bool]:
    return lambda now, rows: rows > most


class Fuse(torch.autograd.Function):
    """The identity, whose backward may fail: what comes after it has its gradients by then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.fault(len(gradient))
        return gradient, None


FAULTS = unwalked(WeakKeyDictionary[nn.Module, dict[str, Fault]]())


def stored_outside(name: str) -> Any:
    """Return a property that holds a fault where a change of it is no change of the model."""

    def find(net: nn.Module) -> Fault:
        return FAULTS().setdefault(net, {}).setdefault(name, Fault())

    return property(find, lambda net, fault: FAULTS().setdefault(net, {}).update({name: fault}))


class Net(nn.Module):
    """Two layers; forward fails after the first, backward between them."""

    forward_fault, backward_fault = stored_outside("forward"), stored_outside("backward")

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.middle = middle or nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.first(x))
        self.forward_fault(len(x))
        return self.last(Fuse.apply(hidden, self.backward_fault))


def coupled(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


LOSSES: dict[str, Any] = {
    "known": F.cross_entropy,
    "coupled": coupled,
    "declared": Loss.per_sample(lambda out, y: F.cross_entropy(out, y, reduction="none")),
    "lazy": F.cross_entropy,
    "lazy coupled": coupled,
    "before": F.cross_entropy,
    "bfloat16": nn.MSELoss(reduction="sum"),
    "algorithm 1": Loss.algorithm1(F.cross_entropy),
}
ORACLES = LOSSES | {"declared": F.cross_entropy}


@dataclass
class Setting:
    """A model, a batch, and what the full batch gives at once."""

    variant: str
    net: Net
    x: Tensor
    y: Tensor
    engine: Engine
    want: dict[str, Tensor]
    observed: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def backward(self) -> Tensor:
        loss = self.engine.backward(*self.batch(), observe=lambda *o: self.observed.append(o))
        return loss.double()

    def batch(self) -> tuple[Any, ...]:
        lazy = LazyBatch(TensorDataset(self.x, self.y))
        return (lazy,) if "lazy" in self.variant else (self.x, self.y)

    def check(self) -> None:
        """The gradient, the loss, one update, and each sample shown once, in order."""
        self.net.forward_fault, self.net.backward_fault = Fault(), Fault()
        torch.optim.SGD(self.net.parameters(), lr=0.5).step()
        assert_exact(double(state_of(self.net)), double(self.want))
        outputs, targets = zip(*self.observed, strict=True)
        assert torch.equal(torch.cat(targets), self.y)
        assert [len(o) for o in outputs] == [len(t) for t in targets]
        self.observed.clear()


def state_of(net: Net) -> dict[str, Tensor]:
    found = {f"{n}.grad": p.grad for n, p in net.named_parameters() if p.grad is not None}
    return found | {n: p.detach() for n, p in net.named_parameters()}


def double(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in found.items()}


def small_integers(tensors: list[Tensor]) -> None:
    """Make everything exact in bfloat16, so that order and rounding change nothing."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randint(-1, 2, tensor.shape))


def setting(variant: str, *, in_accumulator: bool, net: Net | None = None) -> Setting:
    torch.manual_seed(3)
    net = (net or Net()).double()
    x, y = torch.randn(BATCH, 3).double(), torch.randint(0, 2, (BATCH,))
    if variant == "bfloat16":
        net.middle = nn.Identity()
        y = torch.randn(BATCH, 2).double()
        small_integers([*net.parameters(), x, y])
    if variant == "before":
        for p in list(net.parameters())[1:]:
            p.grad = torch.randn_like(p)
    twin = copy.deepcopy(net)
    for p, q in zip(twin.parameters(), net.parameters(), strict=True):
        p.grad = None if q.grad is None else q.grad.clone()
    rows = [range(i, min(i + MICRO, BATCH)) for i in range(0, BATCH, MICRO)]
    if variant == "algorithm 1":
        for r in rows:
            (F.cross_entropy(twin(x[r]), y[r]) / len(rows)).backward()
    else:
        ORACLES[variant](twin(x), y).backward()
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    if variant == "bfloat16":
        net, x, y = net.bfloat16(), x.bfloat16(), y.bfloat16()
    engine = Engine(net, LOSSES[variant], micro_batch=MICRO)
    if in_accumulator:
        sum_in_accumulator(engine)
    return Setting(variant, net, x, y, engine, state_of(twin))


def sum_in_accumulator(engine: Engine) -> None:
    """Sum as a plan would have it that finds room for an accumulator."""
    step = engine._runner.step

    def with_accumulator(*arguments: Any, **others: Any) -> Any:
        made = step(*arguments, **others)
        made.accumulator = True
        if made.divided and made.gradients is not None:
            made.gradients.divide(accumulator=True)
        return made

    engine._runner.step = with_accumulator  # type: ignore[method-assign]


def calls(variant: str, place: str, *, in_accumulator: bool) -> int:
    """How often a step without a fault passes the place."""
    full = setting(variant, in_accumulator=in_accumulator)
    full.backward()
    return len(getattr(full.net, f"{place}_fault").sizes)


EXACT = ["known", "coupled", "declared", "lazy", "lazy coupled", "before", "bfloat16"]


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("in_accumulator", [False, True], ids=["in place", "apart"])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("variant", EXACT)
def test_a_fault_at_every_call(variant: str, place: str, in_accumulator: bool) -> None:
    """Two forwards look, and one with the backward that is not torch's own; three stream.

    That backward is compared in three more. A coupled loss is met in the first that streams, and
    one of samples that are loaded begins that backward with its weights: both take two passes.
    """
    count = calls(variant, place, in_accumulator=in_accumulator)
    assert (
        count
        == {
            ("forward", False): 9,
            ("forward", True): 12,
            ("backward", False): 7,
            ("backward", True): 7,
        }[place, variant.startswith(("coupled", "lazy"))]
    )
    for call in range(count):
        got = setting(variant, in_accumulator=in_accumulator)
        setattr(got.net, f"{place}_fault", Fault(at(call), ERRORS[call % len(ERRORS)]))
        rng_state = torch.get_rng_state()
        loss = got.backward()
        report = got.engine.last
        assert report is not None
        assert report.retries == 1
        assert report.micro_batch == 2
        assert "lazy" in variant or torch.equal(rng_state, torch.get_rng_state()), (
            "nothing draws here"
        )
        fresh = setting(variant, in_accumulator=in_accumulator).net.double()
        targets = got.y.double() if got.y.is_floating_point() else got.y
        full = ORACLES[variant](fresh(got.x.double()), targets)
        assert_exact({"loss": loss}, {"loss": full.detach()})
        got.check()


@pytest.mark.parametrize(
    ("place", "in_accumulator", "sizes"),
    [
        ("forward", False, [4, 4, 2, 2, 2]),
        ("forward", True, [4, 4, 2, 2, 2]),
        ("backward", True, [4, 4, 2, 2, 2]),
        ("backward", False, [4, 4, 2, 2, 2, 2, 2]),
    ],
)
def test_it_costs_one_micro_batch_or_else_one_step(
    place: str, in_accumulator: bool, sizes: list[int]
) -> None:
    got = setting("known", in_accumulator=in_accumulator)
    got.backward()  # the look is over
    got.net.zero_grad()
    got.observed.clear()
    setattr(got.net, f"{place}_fault", Fault(at(1)))
    got.backward()
    fault = getattr(got.net, f"{place}_fault")
    assert fault.sizes == sizes
    got.check()


@pytest.mark.parametrize(
    ("in_accumulator", "sizes"),
    [(False, [5, 1, 3, 1]), (True, [5, 3, 2])],
    ids=["in place", "apart"],
)
def test_rows_that_were_shown_before_a_step_starts_over_are_not_shown_again(
    in_accumulator: bool, sizes: list[int]
) -> None:
    """In place, 5 rows are shown when the second backward fails; then come 3, 3, 3 and 1."""
    got = setting("known", in_accumulator=in_accumulator)
    got.engine.micro_batch = 5
    got.backward()
    got.net.zero_grad()
    got.observed.clear()
    got.net.backward_fault = Fault(at(1))
    got.backward()
    assert [len(outputs) for outputs, _ in got.observed] == sizes
    assert_exact({"": torch.cat([o for o, _ in got.observed])}, {"": got.net(got.x).detach()})
    got.check()


@pytest.mark.parametrize("call", [0, 1, 2])
def test_algorithm1_to_the_letter_starts_over(call: int) -> None:
    """Its micro-batch means do not add up over halves: N_S is counted anew."""
    got = setting("algorithm 1", in_accumulator=True)
    got.net.backward_fault = Fault(at(call))
    got.backward()
    twin = copy.deepcopy(setting("algorithm 1", in_accumulator=True).net)
    for i in range(0, BATCH, 2):
        (F.cross_entropy(twin(got.x[i : i + 2]), got.y[i : i + 2]) / 5).backward()
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    got.want = state_of(twin)
    got.check()


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("in_accumulator", [False, True], ids=["in place", "apart"])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("most", [2, 3])
@pytest.mark.parametrize("variant", EXACT)
def test_a_fault_that_stays_above_a_size(
    variant: str, most: int, place: str, in_accumulator: bool
) -> None:
    got = setting(variant, in_accumulator=in_accumulator)
    setattr(got.net, f"{place}_fault", Fault(above(most)))
    got.backward()
    report, plan = got.engine.last, got.engine.plan
    assert report is not None
    assert plan is not None
    assert report.retries >= 1
    assert report.micro_batch <= most
    assert plan.micro_batch == report.micro_batch
    assert f"{report.micro_batch} from here on" in str(plan)
    got.check()
    again = setting(variant, in_accumulator=in_accumulator, net=None)
    got.net.load_state_dict(again.net.state_dict())
    for p, q in zip(got.net.parameters(), again.net.parameters(), strict=True):
        p.grad = q.grad
    setattr(got.net, f"{place}_fault", Fault(above(most)))
    got.backward()
    assert got.engine.last is not None
    assert got.engine.last.retries == 0
    assert got.engine.last.micro_batches == -(-BATCH // report.micro_batch)
    assert "from here on" in str(got.engine.plan)
    got.check()


@pytest.mark.product
@pytest.mark.parametrize("in_accumulator", [False, True], ids=["in place", "apart"])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("variant", EXACT)
def test_a_fault_at_every_size_leaves_no_trace(
    variant: str, place: str, in_accumulator: bool
) -> None:
    got = setting(variant, in_accumulator=in_accumulator)
    before = snapshot(got.net)
    for error in ERRORS:
        setattr(got.net, f"{place}_fault", Fault(above(0), error))
        with pytest.raises(type(error)) as raised:
            got.backward()
        assert raised.value is error
        assert same(before, snapshot(got.net))
    got.net.forward_fault, got.net.backward_fault = Fault(), Fault()
    got.observed.clear()
    got.backward()
    assert got.engine.last is not None
    assert got.engine.last.micro_batch == MICRO, "a step that failed says nothing about size"
    got.check()


@pytest.mark.product
@pytest.mark.parametrize("variant", ["known", "coupled"])
@pytest.mark.parametrize("call", range(8))
def test_evaluate(variant: str, call: int) -> None:
    got = setting(variant, in_accumulator=False)
    got.net.forward_fault = Fault(at(call))
    observed: list[Tensor] = []
    loss = got.engine.evaluate(got.x, got.y, observe=lambda o, t: observed.append(t))
    got.net.forward_fault = Fault()
    with torch.no_grad():
        want = LOSSES[variant](got.net(got.x), got.y)
    assert_exact({"loss": loss}, {"loss": want})
    assert torch.equal(torch.cat(observed), got.y)
    assert all(p.grad is None for p in got.net.parameters())


def by_hand(net: nn.Module, x: Tensor, y: Tensor, sizes: list[int]) -> Tensor:
    """The micro-batches of these sizes, one after another."""
    total, start = torch.zeros((), dtype=x.dtype), 0
    for size in sizes:
        rows = slice(start, start + size)
        part = F.cross_entropy(net(x[rows]), y[rows], reduction="sum") / len(x)
        part.backward()
        total, start = total + part.detach(), start + size
    return total


class Dropping(nn.Module):
    """Draws from torch, numpy and Python; numpy keeps a second normal number for later."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 + 0.1 * float(np.random.randn()) + 0.1 * random.random() + random.gauss(0, 0.1)
        return scale * F.dropout(x, 0.5, training=self.training)


@pytest.mark.parametrize(
    ("place", "in_accumulator", "sizes"),
    [
        ("forward", False, [4, 2, 2, 2]),
        ("backward", True, [4, 2, 2, 2]),
        ("backward", False, [2] * 5),
    ],
)
def test_the_rng_states_are_those_of_the_micro_batches_that_count(
    place: str, in_accumulator: bool, sizes: list[int]
) -> None:
    for normals in (0, 1):
        got = setting("known", in_accumulator=in_accumulator, net=Net(Dropping()))
        got.backward()
        got.net.zero_grad()
        setattr(got.net, f"{place}_fault", Fault(at(1)))
        np.random.seed(normals)
        random.seed(1)
        torch.manual_seed(1)
        np.random.randn(normals)
        twin = copy.deepcopy(got.net)
        found = state_with(got.net, got.engine.backward(got.x, got.y))
        after = torch.rand(()), np.random.randn(), random.gauss(0, 1)
        twin.forward_fault, twin.backward_fault = Fault(), Fault()
        np.random.seed(normals)
        random.seed(1)
        torch.manual_seed(1)
        np.random.randn(normals)
        assert_exact(found, state_with(twin, by_hand(twin, got.x, got.y, sizes)))
        assert after == (torch.rand(()), np.random.randn(), random.gauss(0, 1))


class Late(Dropping):
    """Draws nothing until it is told to."""

    draws = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.draws else x.tanh()


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("in_accumulator", [False, True], ids=["in place", "apart"])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("draws", [False, True])
def test_where_nothing_was_drawn_before_rng_states_are_not_noted(
    draws: bool, place: str, in_accumulator: bool
) -> None:
    """Where a micro-batch began is then known only if nothing is drawn in this step either."""
    late = Late()
    got = setting("known", in_accumulator=in_accumulator, net=Net(late))
    got.backward()
    got.net.zero_grad()
    setattr(got.net, f"{place}_fault", Fault(at(1)))
    late.draws = draws
    twin = copy.deepcopy(got.net)
    roll()
    found = state_with(got.net, got.engine.backward(got.x, got.y))
    after = torch.rand(()), np.random.randn(), random.gauss(0, 1)
    twin.forward_fault, twin.backward_fault = Fault(), Fault()
    one = place == "forward" or in_accumulator
    sizes = [4, 2, 2, 2] if one and not draws else [2] * 5
    roll()
    assert_exact(found, state_with(twin, by_hand(twin, got.x, got.y, sizes)))
    assert after == (torch.rand(()), np.random.randn(), random.gauss(0, 1))


def state_with(net: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """What a step has left, and its loss."""
    gradients = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    return {"loss": loss, **gradients, **{n: b.clone() for n, b in net.named_buffers()}}


@pytest.mark.product
@pytest.mark.parametrize("in_accumulator", [False, True], ids=["in place", "apart"])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("variant", ["known", "coupled", "lazy", "lazy coupled"])
def test_a_model_that_draws_survives_every_fault(
    variant: str, place: str, in_accumulator: bool
) -> None:
    for call in range(calls(variant, place, in_accumulator=in_accumulator)):
        got = setting(variant, in_accumulator=in_accumulator, net=Net(nn.Dropout(0.5)))
        setattr(got.net, f"{place}_fault", Fault(at(call)))
        assert got.backward().isfinite()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in got.net.parameters())
        assert torch.equal(torch.cat([y for _, y in got.observed]), got.y)


@pytest.mark.parametrize("call", [5, 6])
def test_a_coupled_loss_of_a_model_that_draws_is_that_of_one_set_of_draws(call: int) -> None:
    """The last of pass 1, the first of pass 2: there halves would draw other numbers."""
    got = setting("coupled", in_accumulator=True, net=Net(Dropping()))
    twin = copy.deepcopy(got.net)
    got.net.forward_fault = Fault(at(call))
    roll()
    found = state_with(got.net, got.engine.backward(got.x, got.y))
    assert got.engine.last is not None
    assert got.engine.last.retries == 1
    roll()
    loss = coupled(torch.cat([twin(rows) for rows in got.x.split(2)]), got.y)
    loss.backward()
    assert_exact(found, state_with(twin, loss.detach()))


def roll() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)


@pytest.mark.parametrize("call", [0, 1, 2])
def test_running_statistics_are_those_of_the_micro_batches_that_count(call: int) -> None:
    net = Net(nn.BatchNorm1d(4)).double()
    x, y = torch.randn(12, 3).double(), torch.randint(0, 2, (12,))
    engine = Engine(net, F.cross_entropy, micro_batch=4, batchnorm="local")
    engine.backward(x, y)
    net.zero_grad()
    sizes = [[2] * 6, [4, 2, 2, 2, 2], [4, 4, 2, 2]][call]
    twin = copy.deepcopy(net)
    net.forward_fault = Fault(at(call))
    engine.backward(x, y)
    net.forward_fault = Fault()
    by_hand(twin, x, y, sizes)
    for mine, theirs in zip(net.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_undivided_step_that_fails_late_has_moved_nothing() -> None:
    net = Net(nn.BatchNorm1d(4)).double()
    x, y = torch.randn(12, 3).double(), torch.randint(0, 2, (12,))
    engine = Engine(net, F.cross_entropy, micro_batch=12, batchnorm="local")
    for _ in range(2):
        twin = copy.deepcopy(net)
        net.backward_fault = Fault(above(6))
        engine.backward(x, y)
        engine._runner._shrunk.clear()  # the next one begins undivided, too, and knows the model
        by_hand(twin, x, y, [6, 6])
        for mine, theirs in zip(net.buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("index", [0, 1, 2, 3, 4])
def test_buffers_that_forward_moves_are_moved_once(index: int) -> None:
    """Spectral norm, and a counter: a forward that ended halfway has moved them already."""

    class Counting(Net):
        def __init__(self) -> None:
            super().__init__(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return super().forward(x)

    got = setting("known", in_accumulator=False, net=Counting())
    net, x, y = got.net, got.x, got.y
    for calls in (5, 3):  # the second step knows which buffers move
        twin = copy.deepcopy(net)
        net.forward_fault = Fault(at(index % calls))
        found = state_with(net, got.engine.backward(x, y))
        net.forward_fault = Fault()
        assert_exact(found, state_with(twin, by_hand(twin, x, y, [BATCH])))
        net.zero_grad()


def test_an_undivided_step_becomes_a_divided_one() -> None:
    for place in ("forward", "backward"):
        got = setting("known", in_accumulator=False)
        engine = got.engine = Engine(got.net, F.cross_entropy, micro_batch=64)
        setattr(got.net, f"{place}_fault", Fault(above(9)))
        got.backward()
        assert engine.last is not None
        assert (engine.last.retries, engine.last.micro_batch) == (1, 5)
        assert "out of memory at 10 samples in a micro-batch: 5 from here on" in str(engine.plan)
        got.check()


@pytest.mark.product
@pytest.mark.parametrize("loss", [F.cross_entropy, coupled])
@pytest.mark.parametrize("when", [above(6), above(3), above(2), at(1), at(3)])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("micro_batch", [10, 4])
def test_with_batch_norm_the_step_begins_again_in_smaller_lanes(
    micro_batch: int, place: str, when: Callable[[int, int], bool], loss: Any
) -> None:
    net = Net(nn.BatchNorm1d(4)).double()
    x, y = torch.randn(10, 3).double(), torch.randint(0, 2, (10,))
    engine = Engine(net, loss, micro_batch=micro_batch)
    for _ in range(2):
        twin, observed = copy.deepcopy(net), list[Tensor]()
        full = loss(twin(x), y)
        full.backward()
        fault = Fault(when)
        setattr(net, f"{place}_fault", fault)
        found = engine.backward(
            x, y, observe=lambda _, targets, observed=observed: observed.append(targets)
        )
        setattr(net, f"{place}_fault", Fault())
        assert engine.last is not None
        assert (engine.last.retries > 0) == fault.failed
        assert_exact(state_with(net, found), state_with(twin, full.detach()))
        assert torch.equal(torch.cat(observed), y)
        net.zero_grad()


def test_what_cannot_go_in_lanes_says_what_led_there() -> None:
    net = Net(nn.BatchNorm1d(4))
    engine = Engine(net, Loss.algorithm1(F.cross_entropy), micro_batch=10)
    x, y = torch.randn(10, 3), torch.randint(0, 2, (10,))
    error = torch.OutOfMemoryError("full")
    net.forward_fault = Fault(at(0), error)
    before = snapshot(net)
    with pytest.raises(NotExactError, match="BatchNorm") as raised:
        engine.backward(x, y)
    assert raised.value.__cause__ is error
    assert same(before, snapshot(net))


def test_an_observer_that_runs_out_of_memory_is_not_called_again() -> None:
    for variant in ("known", "coupled"):
        got = setting(variant, in_accumulator=True)
        before, calls = snapshot(got.net), []

        def full(_: Any, targets: Tensor, calls: list[Tensor] = calls) -> None:
            calls.append(targets)
            raise torch.OutOfMemoryError("full")

        with pytest.raises(torch.OutOfMemoryError):
            got.engine.backward(got.x, got.y, observe=full)
        assert len(calls) == 1
        assert same(before, snapshot(got.net))


def test_the_loss_of_the_full_batch_may_run_out_of_memory(tmp_path: Path) -> None:
    full = tmp_path / "full"  # what is listed would be restored, and the next try full, too

    def first_full(out: Tensor, y: Tensor) -> Tensor:
        if not out.is_meta and not full.exists():
            full.touch()
            raise torch.OutOfMemoryError("full")
        return coupled(out, y)

    got = setting("coupled", in_accumulator=False)
    got.engine = Engine(got.net, first_full, micro_batch=MICRO)
    got.backward()
    assert got.engine.last is not None
    assert got.engine.last.retries == 1
    got.check()


def test_an_error_that_the_person_was_handling_is_not_ours() -> None:
    """An out-of-memory error outside must not make a fault in the step look like one."""
    got = setting("known", in_accumulator=False)
    got.net.forward_fault = Fault(at(0), ValueError("a fault of the model"))
    try:
        raise torch.OutOfMemoryError("outside")
    except torch.OutOfMemoryError:
        retained = torch.ones(3)
        with pytest.raises(ValueError, match="a fault of the model"):
            got.backward()
        assert retained.sum() == 3
    assert got.net.forward_fault.sizes == [4], "it was tried once"


class Watching(Net):
    """Notes what forward makes, and how much of that is left when it is called after a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []
        self.left: int | None = None

    def alive(self) -> int:
        return sum(ref() is not None for ref in self.made)

    def forward(self, x: Tensor) -> Tensor:
        if self.left is None and (self.forward_fault.failed or self.backward_fault.failed):
            self.left = self.alive()
        big = torch.cat([x, x])
        self.made.append(weakref.ref(big))
        hidden = self.first(x) + big[: len(x), :1]
        self.made.append(weakref.ref(hidden))
        self.forward_fault(len(x))
        out = self.last(Fuse.apply(hidden, self.backward_fault))
        self.made.append(weakref.ref(out))
        return out


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.product
@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("in_accumulator", [False, True], ids=["in place", "apart"])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("variant", ["known", "coupled", "lazy", "lazy coupled"])
def test_nothing_of_a_failed_attempt_is_in_memory_when_it_is_tried_again(
    variant: str, place: str, in_accumulator: bool
) -> None:
    got = setting(variant, in_accumulator=in_accumulator, net=Watching())
    net = got.net
    assert isinstance(net, Watching)
    for call in range(calls(variant, place, in_accumulator=in_accumulator)):
        setattr(net, f"{place}_fault", Fault(at(call), torch.OutOfMemoryError("full")))
        net.made.clear()
        net.left = None
        got.engine._runner._traits.clear()
        got.engine._runner._shrunk.clear()
        got.engine.backward(*got.batch())
        assert net.left == 0, call
        assert net.alive() == 0


@pytest.mark.product
@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("micro_batch", [MICRO, BATCH])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("variant", ["known", "coupled", "lazy", "lazy coupled"])
def test_the_error_that_goes_out_holds_no_tensor_of_the_step(
    variant: str, place: str, micro_batch: int
) -> None:
    for _ in range(2):  # the first makes small masks, once a process
        got = setting(variant, in_accumulator=False, net=Watching())
        net = got.net
        assert isinstance(net, Watching)
        got.engine.micro_batch = micro_batch
        error = torch.OutOfMemoryError("full")
        setattr(net, f"{place}_fault", Fault(above(0), error))
        tensors = tensors_alive()
        with pytest.raises(torch.OutOfMemoryError) as raised:
            got.engine.backward(*got.batch())
        assert raised.value is error
        frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert frames[-1] == "__call__", "it still says where"
        assert net.alive() == 0
    assert tensors_alive() == tensors


def tensors_alive() -> int:
    kinds = Counter(map(type, gc.get_objects()))  # few, of which to ask what they are
    return sum(count for variant, count in kinds.items() if issubclass(variant, Tensor))


REAL = """
import resource, sys
import torch
from torch import nn
from torch.nn import functional as F
from anybatch import Engine
from anybatch.tools.exactness import error_of, tolerance

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(),
                      nn.Linear(512, 4)).double()
x, y = torch.randn(8192, 32).double(), torch.randint(0, 4, (8192,))

def state(loss):
    found = {"loss": loss.detach().clone()}
    for name, parameter in model.named_parameters():
        found[name] = parameter.grad.clone()
    return found

def undivided(rows):
    model.zero_grad()
    loss = F.cross_entropy(model(x[rows]), y[rows])
    loss.backward()
    return state(loss)

def data_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData"))

want = undivided(torch.arange(8192))
noise = error_of(undivided(torch.randperm(8192)), want)
model.zero_grad()
Engine(model, F.cross_entropy, micro_batch=4).backward(x[:8], y[:8])  # imports what is needed
model.zero_grad()
engine = Engine(model, F.cross_entropy, micro_batch=int(sys.argv[1]))
if sys.argv[2] == "apart":
    make = engine._runner.step

    def with_accumulator(*arguments, **others):
        step = make(*arguments, **others)
        step.accumulator = True
        step.gradients.divide(accumulator=True)
        return step

    engine._runner.step = with_accumulator
limit = data_bytes() + 30 * 2**20  # one activation of the full batch is 32 MiB
resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
try:
    undivided(torch.arange(8192))
except RuntimeError as error:
    print("by hand:", str(error).split(": ")[1])
model.zero_grad()
loss = engine.backward(x, y)
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
errors = error_of(state(loss), want)
assert max(errors.values()) <= tolerance(noise), errors
print("retries", engine.last.retries, "size", engine.last.micro_batch)
again = engine.last.micro_batch
model.zero_grad()
engine.backward(x, y)
assert (engine.last.retries, engine.last.micro_batch) == (0, again)
"""


@pytest.mark.large(few=1)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RLIMIT_DATA counts on Linux")
@pytest.mark.parametrize("in_accumulator", ["in place", "apart"])
@pytest.mark.parametrize("micro_batch", [8192, 6000])
def test_a_real_limit(micro_batch: int, in_accumulator: str) -> None:
    """The asked micro-batch cannot be allocated in this process, and the step is exact."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", REAL, str(micro_batch), in_accumulator],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout.splitlines()
    assert "can't allocate memory" in first
    assert int(second.split()[1]) >= 1
    assert int(second.split()[3]) < micro_batch
