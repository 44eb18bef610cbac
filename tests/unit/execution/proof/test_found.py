"""What people write, and a fresh eye has found: never shown where wrong, exact where honest."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_after, state_of, undivided
from tests.unit.execution.proof.nets import Body, Net, batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from anybatch import Engine
from anybatch.errors import AnybatchError, BudgetError, NotExactError

RowFunction = Callable[[Tensor, Any], Tensor]


def chosen(h: Tensor, ids: Tensor) -> Tensor:
    sums = torch.zeros(9, h.shape[1], dtype=h.dtype).index_add(0, ids, h)
    return h - sums[ids] / 2


def counted(h: Tensor, ids: Tensor) -> Tensor:
    often = torch.zeros(9, dtype=h.dtype).scatter_add(0, ids, torch.ones(len(ids), dtype=h.dtype))
    return h / often[ids][:, None]


def last_writer(h: Tensor, ids: Tensor) -> Tensor:
    table = torch.zeros(9, h.shape[1], dtype=h.dtype)
    table[ids] = h.detach()
    return h + table[ids]


def longest(h: Tensor, rows: list[Any]) -> Tensor:
    return h * max(len(row) for row in rows)


def halves(h: Tensor, _: Any) -> Tensor:
    half = len(h) // 2
    return torch.cat([h[:half].tanh(), h[half:]])


def every_other(h: Tensor, _: Any) -> Tensor:
    h = h.clone()
    h[::2] *= -1
    return h


def among(h: Tensor, ids: Tensor) -> Tensor:
    return h * torch.isin(ids, ids + 1)[:, None]


def all_alike(h: Tensor, ids: Tensor) -> Tensor:
    return h * (2.0 if torch.equal(ids, ids.clamp(max=5)) else 1.0)


def quantised(h: Tensor, _: Any) -> Tensor:
    def pack(saved: Tensor) -> Tensor:
        return (saved / saved.abs().max() * 7).round() / 7 * saved.abs().max()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        return (h * h).exp()


def filters(h: Tensor, _: Any) -> Tensor:
    made = (h.softmax(0).sum(0) * torch.ones(len(h), 1, dtype=h.dtype))[:, None, :3]
    return h + F.conv1d(h[:, None], made[:1], padding=1)[:, 0]


def bags(h: Tensor, _: Any) -> Tensor:
    table = torch.eye(8, dtype=h.dtype)
    weights = h.detach().softmax(0)
    places = torch.arange(8).expand(len(h), 8)
    return h + F.embedding_bag(places, table, per_sample_weights=weights, mode="sum")


def poured(h: Tensor, ids: Tensor) -> Tensor:
    table = torch.arange(11.0, dtype=h.dtype)[:, None].expand(11, 8)
    return h.masked_scatter((ids > 2)[:, None].expand_as(h), table)


def of_ones(h: Tensor, _: Any) -> Tensor:
    return h / torch.ones(len(h), 1, dtype=h.dtype).sum()


WRONG: dict[str, RowFunction] = {
    "sums by an id of the input": chosen,
    "how often an id comes": counted,
    "the last that has written": last_writer,
    "the longest of a list": longest,
    "halves": halves,
    "every other row": every_other,
    "isin": among,
    "equal": all_alike,
    "saved tensors in few bits": quantised,
    "filters of all samples": filters,
    "weights of bags": bags,
    "a table that is poured": poured,
    "a sum of ones": of_ones,
    "a tensor of the length": lambda h, _: h / torch.tensor(float(len(h)), dtype=h.dtype),
    "alpha": lambda h, _: torch.add(h, h, alpha=1 / len(h)),
    "eps": lambda h, _: F.layer_norm(h, (8,), eps=1 / len(h)),
    "an entry of a table": lambda h, _: h * torch.linspace(0, 1, 20, dtype=h.dtype)[len(h)],
    "the first rows of a table": lambda h, _: h + torch.randn(20, 8, dtype=h.dtype)[: len(h)],
    "numbers of a list": lambda h, _: h + torch.tensor(range(len(h)), dtype=h.dtype)[:, None],
    "a generator": lambda h, _: (
        h + torch.randn(h.shape, dtype=h.dtype, generator=torch.Generator().manual_seed(3))
    ),
}


class With(nn.Module):
    """A body that is given a second input, behind a gate."""

    def __init__(self, body: RowFunction, gate: float) -> None:
        super().__init__()
        self.first, self.last, self.body = nn.Linear(6, 8), nn.Linear(8, 3), body
        self.gate = nn.Parameter(torch.tensor(gate))

    def forward(self, x: Tensor, more: Any) -> Tensor:
        h = self.first(x)
        return self.last(h + self.gate * self.body(h, more))


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("micro_batch", [1, 3, 4])
@pytest.mark.parametrize("gate", [0.0, 1.0])
@pytest.mark.parametrize("name", WRONG)
def test_what_a_fresh_eye_has_found_is_not_shown(name: str, gate: float, micro_batch: int) -> None:
    net, (x, y) = With(WRONG[name], gate).double(), batch()
    ids = torch.tensor([0, 1, 2, 3, 0, 7, 8, 1, 5, 5, 4])  # the first four do not meet
    more = [[0] * (1 + i) for i in ids.tolist()] if name == "the longest of a list" else ids
    engine = Engine(net, F.cross_entropy, micro_batch=micro_batch)
    try:
        engine.backward((x, more), y)
    except AnybatchError:
        return
    assert engine.plan is not None
    assert not engine.plan.exact


class Reversal(torch.autograd.Function):
    """The identity; its gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None


class Annealed(nn.Module):
    """A reversed gradient that grows with each call, as domain-adversarial networks have it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        factor = 2 / (1 + math.exp(-self.calls / 10)) - 1
        out: Tensor = Reversal.apply(h, -factor)
        return out


def test_a_counter_that_only_backward_reads_is_refused() -> None:
    net, (x, y) = Net(Annealed()).double(), batch()
    with pytest.raises(NotExactError, match=r"backward .* each call moves body\.calls"):
        Engine(net, F.cross_entropy, micro_batch=3).backward(x, y)


def test_a_module_that_is_replaced_is_looked_at() -> None:
    class Shift(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h - torch.zeros(8, dtype=h.dtype)

    class Centre(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h - h.detach().mean(0)

    net, (x, y) = Net(Shift()).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    engine.backward(x, y)
    net.body = nn.Tanh()
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.exact.step == 2
    net.body = Centre()
    with pytest.raises(AnybatchError, match=r"meet in body \(Centre\), in mean"):
        engine.backward(x, y)


def test_a_function_that_is_replaced_is_looked_at() -> None:
    net, (x, y) = Net(lambda h: h - torch.zeros(8, dtype=h.dtype)).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=3)
    engine.backward(x, y)
    net.body = lambda h: h - h.detach().mean(0)
    with pytest.raises(AnybatchError, match="meet in Net, in mean"):
        engine.backward(x, y)


def weighted(outputs: Tensor, y: Tensor, weight: float) -> Tensor:
    return F.cross_entropy(outputs * weight, y)


def huber(outputs: Tensor, y: Tensor, delta: float) -> Tensor:
    return F.huber_loss(outputs[:, 0], y.to(outputs.dtype), delta=delta)


@pytest.mark.parametrize("of_number", [weighted, huber])
def test_a_loss_whose_number_becomes_the_length_is_compared_at_both_sizes(
    of_number: Callable[[Tensor, Tensor, float], Tensor],
) -> None:
    later: list[int] = []

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return of_number(outputs, y, len(outputs) / 10 if later else 0.5)

    net, (x, y) = nn.Linear(6, 3).double(), batch()
    engine = Engine(net, loss, micro_batch=3)
    engine.backward(x, y)
    later.append(1)
    net.zero_grad()
    want = undivided(net, loss, x, y)
    assert_exact(state_of(net, engine.backward(x, y)), want)


def packed(net: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    some: Any = net
    inside = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    last: Tensor = some.rnn(inside)[1][0]
    return last


def unsorted(net: nn.Module, x: Tensor, lengths: Tensor, *, scatter: bool) -> Tensor:
    some: Any = net
    order = lengths.argsort(descending=True)
    h = some.first(x[order]).tanh().mean(1)
    if scatter:
        back = torch.zeros_like(order).scatter(0, order, torch.arange(len(order)))
    else:
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
    found: Tensor = h[back]
    return found


class Sorted(nn.Module):
    """Rows that are put in order by length, and back."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(6, 8), nn.GRU(6, 8, batch_first=True)
        self.last, self.way = nn.Linear(8, 3), way

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.last(self.way(self, x, lengths))


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize(
    "lengths", [[5, 4, 3, 2, 1, 1, 2], [3, 5, 1, 2, 4, 1, 5], [2, 5, 2, 5, 2, 5, 2]]
)
@pytest.mark.parametrize(
    "way", [packed, partial(unsorted, scatter=True), partial(unsorted, scatter=False)]
)
def test_rows_in_an_order_of_their_own_that_are_restored_are_exact(
    way: Callable[..., Tensor], lengths: list[int], micro_batch: int
) -> None:
    net, y = Sorted(way).double(), torch.randint(0, 3, (7,))
    inputs = torch.randn(7, 5, 6, dtype=torch.float64), torch.tensor(lengths)

    def run(model: nn.Module) -> Tensor:
        return Engine(model, F.cross_entropy, micro_batch=micro_batch).backward(inputs, y)

    assert_exact(state_after(net, run), undivided(net, F.cross_entropy, inputs, y))


def jvp(h: Tensor) -> Tensor:
    found: Tensor = torch.func.jvp(lambda z: z.sin() @ torch.eye(8, dtype=h.dtype), (h,), (h,))[1]
    return found


def forward_jacobian(h: Tensor) -> Tensor:
    found: Tensor = torch.func.vmap(torch.func.jacfwd(lambda one: one**3))(h).sum(-1)
    return found


def hessian(h: Tensor) -> Tensor:
    of_each = torch.func.vmap(torch.func.hessian(lambda one: (one**3).sum()))
    found: Tensor = of_each(h).sum(1)
    return found


FUNCTIONS: dict[str, Body] = {
    "jvp": jvp,
    "a forward Jacobian": forward_jacobian,
    "a Hessian": lambda h: torch.func.vmap(torch.func.hessian(lambda one: (one**3).sum()))(h).sum(
        1
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_in_forward_are_exact(name: str) -> None:
    net, (x, y) = Net(FUNCTIONS[name]).double(), batch()

    def run(model: nn.Module) -> Tensor:
        return Engine(model, F.cross_entropy, micro_batch=3).backward(x, y)

    assert_exact(state_after(net, run), undivided(net, F.cross_entropy, x, y))


class Inside(nn.Module):
    """A model that returns its loss, with a hook inside."""

    def __init__(self, hook: Any, *, extra: bool) -> None:
        super().__init__()
        self.first, self.last, self.hook, self.extra = (
            nn.Linear(6, 8),
            nn.Linear(8, 3),
            hook,
            extra,
        )

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(self.hook)
        out = self.last(h)
        loss = F.cross_entropy(out, y)
        return {"loss": loss, "logits": out} if self.extra else loss


@pytest.mark.parametrize("extra", [True, False])
def test_a_hook_before_a_loss_inside_is_refused_where_it_counts_only_rows(extra: bool) -> None:
    x, y = batch()
    engine = Engine(Inside(lambda g: g / len(g), extra=extra).double(), micro_batch=3)
    with pytest.raises(NotExactError, match="the number or the place of rows"):
        engine.backward({"x": x, "y": y})
    engine = Engine(Inside(lambda g: g * 2, extra=extra).double(), micro_batch=3)
    engine.backward({"x": x, "y": y})
    assert engine.plan is not None
    assert engine.plan.exact, engine.plan.exact


@pytest.mark.parametrize("extra", ["a tight budget", "BatchNorm", "draws"])
def test_a_backward_of_its_own_that_cannot_be_compared_is_not_shown(extra: str) -> None:
    class Doubled(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            h = h * 1
            if h.requires_grad:
                h.register_hook(lambda g: g * 2)
            return h + torch.randn_like(h) if extra == "draws" else h

    norm = nn.BatchNorm1d(8) if extra == "BatchNorm" else nn.Identity()
    (x, y), options = batch(), {"memory": "1GiB"} if extra == "a tight budget" else {}
    net = Net(nn.Sequential(Doubled(), norm)).double()
    engine = Engine(net, F.cross_entropy, micro_batch=3, **options)
    engine.backward(x, y)
    assert engine.plan is not None
    assert (
        f"cannot be compared {'where the model' if extra == 'draws' else 'beside'} {extra}"
        in str(engine.plan.exact)
    )


class Mean(torch.autograd.Function):
    """A linear map whose weight gets the mean of what its rows give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x / len(x)


OWN_BACKWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda g: g * 2,
    "its own norm": lambda g: g / g.norm(dim=1, keepdim=True),
    "rows": lambda g: g * len(g),
    "rows of a size": lambda g: g / g.size(0),
    "rows less one": lambda g: g / (len(g) - 1),
    "weight": lambda g: g,
}


@pytest.mark.large(few=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OWN_BACKWARDS)
def test_a_backward_of_its_own_is_compared_within_a_budget(name: str, dtype: torch.dtype) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 24), nn.Linear(24, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = Mean.apply(x, self.first.weight) if name == "weight" else self.first(x) * 1
            if h.requires_grad:
                h.register_hook(OWN_BACKWARDS[name])
            out: Tensor = self.last(h.tanh())
            return out

    x, y = torch.randn(90, 6, dtype=dtype), torch.arange(90) % 3
    with pytest.raises(BudgetError) as few:
        Engine(Own().to(dtype), F.cross_entropy, memory=1, cache=None).backward(x, y)
    budget = 2 * few.value.needed
    engine = Engine(Own().to(dtype), F.cross_entropy, memory=budget, cache=None)
    if name not in ("twice", "its own norm"):
        with pytest.raises(NotExactError, match="the gradient of a row must not depend"):
            engine.backward(x, y)
        return
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.exact, engine.plan.exact
    assert engine.plan.mechanism == "streaming"
    assert engine.last.peak_bytes is not None
    assert engine.last.peak_bytes <= budget


class OfLengths(nn.Module):
    """Mean over the rows of each sample, in a nested tensor."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.first, self.last, self.layout = nn.Linear(6, 8), nn.Linear(8, 3), layout

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor([*x], layout=self.layout)
        return self.last(torch.stack([one.mean(0) for one in self.first(rows).unbind()]))


@pytest.mark.parametrize("budget", [{"micro_batch": 5}, {"memory": "14KiB", "cache": None}])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_leaves_a_doubt(layout: torch.layout, budget: dict[str, Any]) -> None:
    """One of strided layout has no sizes, which ended in an internal error of torch."""
    net = OfLengths(layout).double()
    x, y = torch.randn(12, 4, 6).double(), torch.randint(3, (12,))
    engine = Engine(net, F.cross_entropy, **budget)
    want = undivided(net, F.cross_entropy, x, y)
    assert_exact(state_of(net, engine.backward(x, y)), want)
    assert engine.plan is not None
    assert engine.plan.mechanism == "undivided" or not engine.plan.exact


def test_sparse_gradients_are_compared_in_halves() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(9, 8, sparse=True), nn.Linear(8, 3)

        def forward(self, words: Tensor) -> Tensor:
            h = self.table(words).mean(1)
            if h.requires_grad:
                h.register_hook(lambda g: g * 2)
            out: Tensor = self.last(h)
            return out

    words, y = torch.arange(24).reshape(8, 3) % 9, torch.arange(8) % 3
    engine = Engine(Words().double(), F.cross_entropy, micro_batch=3)
    engine.backward(words, y)
    assert engine.plan is not None
    assert engine.plan.exact, engine.plan.exact


class Scaled(torch.autograd.Function):
    """A backward that is not torch's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Covariance(nn.Module):
    """Returns a loss of the products of all pairs of samples, as a Gaussian process has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = Scaled.apply(self.first(x))  # type: ignore[no-untyped-call]
        return F.mse_loss(z @ z.T, torch.zeros(len(x), len(x)))


def test_a_covariance_beside_an_own_backward_is_refused() -> None:
    """Its parts are no rows of it: torch failed to say that the shapes of gradients differ."""
    with pytest.raises(AnybatchError, match="samples"):
        Engine(Covariance(), micro_batch=4).backward(torch.randn(12, 3))
