"""What models do in the middle of forward, where lanes stop: found by trying to break them.

Every model is run in lanes and undivided, in float64; each once gave wrong numbers, a dead process
or a damaged model.
"""

from __future__ import annotations

import copy
import enum
import threading
from collections import ChainMap
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from tests.busy import busy
from tests.oracle import assert_exact, state_after, state_of, undivided
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from anybatch import Engine
from anybatch.errors import AnybatchError, LockstepError, NotExactError

N, WIDE = 30, 40
Body = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Layers for a forward that is given."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.first, self.second = nn.Linear(6, WIDE), nn.Linear(WIDE, WIDE)
        self.one, self.two = nn.BatchNorm1d(WIDE), nn.BatchNorm1d(WIDE)
        self.head = nn.Linear(WIDE, 3)
        self.observed: dict[str, Any] = {}
        self.retained: Any = None
        self.prototypes = nn.Parameter(torch.randn(7, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        """[n, 6] -> [n, 3]."""
        return self.body(self, x)


def attribute(net: Net, x: Tensor) -> Tensor:
    net.retained = h = net.first(x)
    h = net.two(net.one(h).tanh())
    return net.head(h + net.retained.detach() * x[:, :1])


def skip_with_graph(net: Net, x: Tensor) -> Tensor:
    net.observed["skip"] = net.first(x)
    return net.head(net.one(net.observed["skip"]).relu() + net.observed["skip"])


def swapped(net: Net, x: Tensor) -> Tensor:
    tail = nn.Sequential(net.one, net.second, net.two)
    return net.head(functional_call(tail, {"1.bias": net.second.bias * 2}, (net.first(x),)))


def no_rows(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    out, rows = torch.zeros_like(h), x[:, 0] > 0
    out[rows] = net.one(h[rows])
    return net.head(out)


def keywords(net: Net, x: Tensor) -> Tensor:
    one = net.one
    h = torch.batch_norm(
        net.first(x), one.weight, one.bias, one.running_mean, one.running_var,
        training=True, momentum=0.1, eps=1e-5, cudnn_enabled=False,
    )  # fmt: skip
    return net.head(h)


def read_past_kernels(net: Net, x: Tensor) -> Tensor:
    h = net.first(x).detach()
    early = h.numpy().sum()
    out = net.one(net.first(x))
    again = copy.deepcopy(h) + h.untyped_storage().nbytes() - h.untyped_storage().nbytes()
    assert h.data_ptr() != 0
    return net.head(out + again * (early - sum(map(sum, h.tolist())) + 1))


def sparse(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    flat = h.detach().flatten() * 1.0
    index = torch.arange(len(flat)).view(1, -1) * 1
    made = torch.sparse_coo_tensor(index, flat, (len(flat),), check_invariants=False)
    out = net.one(h)
    return net.head(out + (made + made).to_dense().view_as(out))


def grown(net: Net, x: Tensor) -> Tensor:
    h = net.first(x).detach().clone()
    out = net.one(net.first(x))
    h.resize_(2 * len(x), WIDE)
    out = net.two(out)
    return net.head(out + h[: len(x)])


def again_in_grad(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)

    def part(h: Tensor) -> Tensor:
        return net.one(h).tanh()

    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        out = checkpoint(part, leaf, use_reentrant=False)
        (grad,) = torch.autograd.grad(out.sum(), leaf)
    return net.head(net.two(h) + grad)


def over_and_over(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    for _ in range(5):
        h = net.one(h.relu_() if h.requires_grad and not h.is_leaf else h.relu())
    return net.head(h)


def ends_in_norm(net: Net, x: Tensor) -> Tensor:
    """Its backward was the first to ask for what a checkpoint computes anew, past all modes."""
    norm = partial(F.batch_norm, running_mean=None, running_var=None, training=True)
    h = checkpoint(lambda z: norm(net.second(norm(z).relu())), net.first(x), use_reentrant=False)
    return net.head(h)


BODIES: list[Body] = [
    attribute, skip_with_graph, swapped, no_rows, keywords, read_past_kernels, sparse, grown,
    again_in_grad, over_and_over, ends_in_norm,
]  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 6, dtype=torch.float64)
    x[:10, 0], x[10:, 0] = -1, 1
    return x, torch.randint(3, (N,))


@pytest.mark.large(few=6)
@pytest.mark.parametrize("micro_batch", [4, 10])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_forward_does_between_meetings_stays_its_own(body: Body, micro_batch: int) -> None:
    model, (x, y) = Net(body).double(), batch()
    objects = [id(p) for p in model.parameters()]
    want = undivided(model, F.cross_entropy, x, y)
    for _ in range(2):
        assert_exact(
            state_after(
                model, lambda m: Engine(m, F.cross_entropy, micro_batch=micro_batch).backward(x, y)
            ),
            want,
        )
    Engine(model, F.cross_entropy, micro_batch=micro_batch).backward(x, y)
    assert [id(p) for p in model.parameters()] == objects


@pytest.mark.parametrize("micro_batch", [10])
def test_features_that_hooks_put_in_a_dict_are_each_lanes_own(micro_batch: int) -> None:
    model, (x, y) = Net(lambda net, x: net.head(features(net, net.one(net.first(x))))), batch()
    observed: dict[str, Tensor] = {}

    def note(_: nn.Module, __: Any, out: Tensor) -> None:
        observed["first"] = out

    def features(net: Net, h: Tensor) -> Tensor:
        return net.two(h) + observed["first"]

    model = model.double()
    model.first.register_forward_hook(note)
    full = F.cross_entropy(model(x), y)
    full.backward()
    want = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for norm in (model.one, model.two):
        norm.reset_running_stats()
    loss = Engine(model, F.cross_entropy, micro_batch=micro_batch).backward(x, y)
    got = [p.grad for p in model.parameters() if p.grad is not None]
    assert torch.allclose(loss, full.detach(), rtol=1e-12)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-13)


def other_layer(net: Net, x: Tensor) -> Tensor:
    norm = net.one if x[0, 0] > 0 else net.two
    return net.head(norm(net.first(x)))


def prototypes(net: Net, x: Tensor) -> Tensor:
    return net.head(net.first(x) @ net.one(net.prototypes).T @ net.prototypes)


def flags(net: Net, x: Tensor) -> Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        return net.head(net.one(net.first(x)))


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (other_layer, LockstepError, "takes another path for other samples"),
        (prototypes, NotExactError, "as many values for any number of samples"),
        (flags, NotExactError, "settings that belong to the whole process"),
    ],
)
def test_what_cannot_wait_is_refused_and_nothing_has_changed(
    body: Body, error: type[Exception], message: str
) -> None:
    model, (x, y) = Net(body).double(), batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    enabled = torch.backends.mkldnn.enabled
    with pytest.raises(error, match=message):
        Engine(model, F.cross_entropy, micro_batch=10).backward(x, y)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.backends.mkldnn.enabled == enabled


def test_an_engine_that_is_called_in_a_lane_is_refused() -> None:
    other = nn.Linear(WIDE, 1).double()

    def nested(net: Net, x: Tensor) -> Tensor:
        h = net.one(net.first(x))
        if x.requires_grad or torch.is_grad_enabled():
            Engine(other, F.mse_loss, micro_batch=2).backward(h.detach(), h.detach()[:, :1])
        return net.head(h)

    x, y = batch()
    with pytest.raises(AnybatchError, match="a step must end before another one begins"):
        Engine(Net(nested).double(), F.cross_entropy, micro_batch=10).backward(x, y)


def test_a_mistake_in_backward_leaves_no_thread_and_no_gradient() -> None:
    def written(net: Net, x: Tensor) -> Tensor:
        h = net.one(net.first(x)).tanh()
        out = net.head(net.two(h))
        h.detach().add_(1)
        with torch.no_grad():
            h.mul_(2)
        return out

    model, (x, y) = Net(written).double(), batch()
    before = busy()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Engine(model, F.cross_entropy, micro_batch=10).backward(x, y)
    assert busy() == before
    assert all(p.grad is None for p in model.parameters())


class Doubled(TorchFunctionMode):
    """Doubles what a batch normalisation returns."""

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func in (F.batch_norm, torch.batch_norm) else found


@pytest.mark.parametrize("micro_batch", [1, 10])
def test_function_modes_of_a_person_hear_what_the_model_calls(micro_batch: int) -> None:
    """One around the step heard the kernels of a lane instead: its gradients were half of them."""
    model, (x, y) = Net(lambda net, x: net.head(net.two(net.one(net.first(x))))).double(), batch()
    with Doubled():
        want = undivided(model, F.cross_entropy, x, y)
        engine = Engine(model, F.cross_entropy, micro_batch=micro_batch)
        assert_exact(state_of(model, engine.backward(x, y)), want)


# Places that no walk finds: an inspection in two lanes finds what comes of them.


class Slotted:
    __slots__ = ("rows",)


class Stash(nn.Module):
    """Stores something of its rows in front of BatchNorm, and reads it behind."""

    rows: Any = None

    def __init__(self, put: Callable[[Any, Tensor], Any], get: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.put, self.get, self.slotted = put, get, Slotted()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        self.put(self, x[:, :1].abs())
        return self.last(self.drop(self.norm(self.first(x))).tanh() * self.get(self))


@lru_cache
def cell() -> list[Any]:
    return []


def into_cell(_: Any, rows: Tensor) -> None:
    cell()[:] = [rows]


STORES: dict[str, Any] = {"chain": ChainMap[str, Any](), "weak": WeakKeyDictionary[Any, Any]()}
LOCAL = threading.local()
SHARED: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "slots": (lambda net, x: setattr(net.slotted, "rows", x), lambda net: net.slotted.rows),
    "a class": (lambda _, x: setattr(Stash, "rows", x), lambda _: Stash.rows),
    "a parameter": (
        lambda net, x: setattr(net.first.weight, "rows", x),
        lambda net: net.first.weight.rows,
    ),
    "a buffer": (
        lambda net, x: setattr(net.norm.running_mean, "rows", x),
        lambda net: net.norm.running_mean.rows,
    ),
    "a file of Python": (lambda _, x: setattr(enum, "rows_", x), lambda _: vars(enum)["rows_"]),
    "a chain of dicts": (
        lambda _, x: STORES["chain"].update(rows=x),
        lambda _: STORES["chain"]["rows"],
    ),
    "a weak dict": (
        lambda net, x: STORES["weak"].update({net: x}),
        lambda net: STORES["weak"][net],
    ),
    "a cache": (into_cell, lambda _: cell()[0]),
    "numbers": (
        lambda _, x: setattr(Stash, "rows", x.tolist()),
        lambda _: torch.tensor(Stash.rows, dtype=torch.double),
    ),
    "the caller's thread": (lambda _, x: x, lambda _: getattr(LOCAL, "factor", 1.0)),
}


@pytest.mark.parametrize("micro_batch", [3, 5])
@pytest.mark.parametrize("name", SHARED)
def test_what_lanes_share_is_refused(
    name: str, micro_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOCAL, "factor", 2.0, raising=False)
    net, (x, y) = Stash(*SHARED[name]).double(), (torch.randn(12, 6), torch.randint(3, (12,)))
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(NotExactError, match="must find what it has stored itself"):
        Engine(net, F.cross_entropy, micro_batch=micro_batch).backward(x.double(), y)
    assert all(map(torch.equal, before, net.parameters()))
    assert all(p.grad is None for p in net.parameters())
    Stash.rows = None
    vars(enum).pop("rows_", None)


def test_what_lanes_have_of_their_own_is_not_refused() -> None:
    """An attribute of a module."""
    net = Stash(lambda net, x: setattr(net, "rows", x), lambda net: net.rows).double()
    net.drop.p = 0.0
    x, y = torch.randn(12, 6).double(), torch.randint(3, (12,))
    want = undivided(net, F.cross_entropy, x, y)
    engine = Engine(net, F.cross_entropy, micro_batch=5)
    assert_exact(state_of(net, engine.backward(x, y)), want)
    assert engine.plan is not None
    assert engine.plan.exact


def asserts(n: int) -> None:
    assert n > 1, "BatchNorm needs two"


def divides(n: int) -> None:
    assert 1 / (n - 1)


def looks_up(n: int) -> None:
    assert dict.fromkeys(range(2, 99), "rows")[n]


@pytest.mark.parametrize("wants", [asserts, divides, looks_up])
def test_a_model_that_takes_no_single_sample_is_inspected_with_more(
    wants: Callable[[int], None],
) -> None:
    """The error of the model came up, of a row that no micro-batch has alone."""

    def body(net: Net, x: Tensor) -> Tensor:
        wants(len(x))
        return net.head(net.one(net.first(x)).tanh())

    torch.manual_seed(0)
    net, (x, y) = Net(body).double(), (torch.randn(12, 6).double(), torch.randint(3, (12,)))
    for micro_batch in (2, 5):
        net.zero_grad()
        want = undivided(net, F.cross_entropy, x, y)
        engine = Engine(net, F.cross_entropy, micro_batch=micro_batch)
        assert_exact(state_of(net, engine.backward(x, y)), want)
        assert engine.plan is not None
        assert engine.plan.mechanism == "lockstep"
