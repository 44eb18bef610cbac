"""Saved tensors that share a storage and count their writes apart, and writes nobody counts."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.offloads import small_leave
from tests.oracle import error_of, state_of, tolerance, undivided
from tests.unit.offloading.steps import LOTS, bounds, equal, offloaded, plain
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.errors import NotExactError
from anybatch.offloading.mover import Handle, Saved, one_count, probe


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_leave(monkeypatch)


class Cells(nn.Module):
    """A cell that is called for every element of a sequence."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for one in x.unbind(1):
            state = self.cell(one, state)
        return state[0] + state[1] if isinstance(state, tuple) else state


class Gates(nn.Module):
    """Gates as cells write them: parts of one storage, each written to when others are saved."""

    def __init__(self, activations: tuple[Callable[[Tensor], Any], ...], *, views: bool) -> None:
        super().__init__()
        self.linear, self.activations, self.views = nn.Linear(6, 24), activations, views

    def forward(self, x: Tensor) -> Tensor:
        all_of_them = self.linear(x)
        cut = all_of_them.split if self.views else all_of_them.unsafe_split
        parts = list(cut(24 // len(self.activations), -1))
        if self.views:
            parts = [part.detach() * 1 + part for part in parts]
        for activation, part in zip(self.activations, parts, strict=True):
            activation(part)
        first, *others = parts
        return sum((first * other for other in others), first.square())


class Layer(nn.Module):
    """A layer behind a linear one, so that what it is given may leave."""

    def __init__(self, layer: Any, shape: tuple[int, ...]) -> None:
        super().__init__()
        numel = torch.Size(shape).numel()
        self.first, self.layer, self.shape = nn.Linear(6, numel), layer, shape

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.first(x).reshape(-1, *self.shape))


def _fused(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 2, x + 1, is_causal=True)


def _partly(x: Tensor) -> Tensor:
    x = x * 1
    x[:, 6:8].sigmoid_()
    return x.unsafe_chunk(2, 1)[0].tanh_() * x.detach()[:, :1]


SEQUENCE, FLAT, IMAGE = (7, 6), (12,), (4, 6, 6)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "GRU": (lambda: nn.GRU(6, 8, batch_first=True), SEQUENCE),
    "GRU, two ways": (lambda: nn.GRU(6, 8, 2, bidirectional=True, batch_first=True), SEQUENCE),
    "LSTM": (lambda: nn.LSTM(6, 8, batch_first=True), SEQUENCE),
    "LSTM, projected": (lambda: nn.LSTM(6, 8, proj_size=3, batch_first=True), SEQUENCE),
    "RNN": (lambda: nn.RNN(6, 8, nonlinearity="relu", batch_first=True), SEQUENCE),
    "GRUCell": (lambda: Cells(nn.GRUCell(6, 8)), SEQUENCE),
    "LSTMCell": (lambda: Cells(nn.LSTMCell(6, 8)), SEQUENCE),
    "RNNCell": (lambda: Cells(nn.RNNCell(6, 8)), SEQUENCE),
    "gates": (lambda: Gates((torch.sigmoid_, torch.tanh_), views=False), (6,)),
    "gates, views": (lambda: Gates((torch.sigmoid_, torch.tanh_), views=True), (6,)),
    "four gates": (
        lambda: Gates((torch.sigmoid_, torch.tanh_, torch.relu_, F.elu_), views=False),
        (6,),
    ),
    "partly": (lambda: Layer(_partly, FLAT), (6,)),
    "attention": (lambda: Layer(_fused, (2, 5, 6)), (6,)),
    "attention layer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), SEQUENCE),
    **{
        f"{one.__name__} in place": (partial(Layer, one(inplace=True), FLAT), (6,))
        for one in (
            *(nn.ReLU, nn.ReLU6, nn.ELU, nn.CELU, nn.SELU, nn.SiLU, nn.Mish, nn.LeakyReLU),
            *(nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Dropout, nn.AlphaDropout),
        )
    },
    **{
        type(one).__name__: (partial(Layer, one, FLAT), (6,))
        for one in (
            *(nn.GELU(), nn.GLU(), nn.PReLU(), nn.LogSigmoid(), nn.Softplus(), nn.Softsign()),
            *(nn.Tanhshrink(), nn.Hardshrink(), nn.Softmax(1), nn.LogSoftmax(1), nn.RMSNorm(12)),
            *(nn.Threshold(0, 1), nn.FeatureAlphaDropout(), nn.LayerNorm(12), nn.BatchNorm1d(12)),
        )
    },
    **{
        type(one).__name__: (partial(Layer, one, IMAGE), (6,))
        for one in (
            *(nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)),
            *(nn.Conv2d(4, 3, 3), nn.ConvTranspose2d(4, 3, 3), nn.Dropout2d(), nn.MaxPool2d(2)),
            *(nn.AvgPool2d(2), nn.LPPool2d(2.0, 2), nn.AdaptiveMaxPool2d(2), nn.Upsample((9, 9))),
            *(nn.FractionalMaxPool2d(2, output_size=3), nn.LocalResponseNorm(2), nn.Unfold(2)),
            *(nn.PixelShuffle(2), nn.ReflectionPad2d(1), nn.AdaptiveAvgPool2d(2)),
        )
    },
}


def _loss(found: Any) -> Tensor:
    outs = found if isinstance(found, tuple) else (found,)
    flat = [t for out in outs for t in (out if isinstance(out, tuple) else (out,))]
    return sum((t.square().mean() for t in flat), torch.zeros(()))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.large(of="what shares a storage", few=8)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_without_it(name: str, dtype: torch.dtype) -> None:
    make, shape = CASES[name]
    model = make().to(dtype).train()
    _same(model, shape, dtype)


@pytest.mark.parametrize("name", ["GRU", "LSTMCell", "gates", "four gates", "partly"])
def test_of_parts_that_count_their_writes_separately(name: str) -> None:
    make, shape = CASES[name]
    _same(make().double(), shape, torch.float64)


def _same(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Require bitwise the same while it is recorded, planned, on demand and within any budget."""
    rows = [torch.randn(n, *shape, dtype=dtype) for n in (5, 5, 5, 3, 5, 4, 4)]

    def step_of(step_in: Iterator[Tensor]) -> Callable[[nn.Module], None]:
        return lambda ours: _loss(ours(next(step_in))).backward()

    first = lambda ours: _loss(ours(rows[0])).backward()  # noqa: E731
    low, high = bounds(model, first)
    wanted = plain(model, step_of(iter(rows)), len(rows))
    for memory in (LOTS, (low + high) // 2):
        off = anybatch.offload(memory=memory, device="cpu")
        few = len(rows) if memory == LOTS else 3
        found = offloaded(model, step_of(iter(rows)), off, few)
        assert all(itertools.starmap(equal, zip(found, wanted, strict=False)))


def test_an_engine_that_offloads_is_exact_with_gates() -> None:
    model = nn.GRU(6, 40, batch_first=True).double()

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = model, nn.Linear(40, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x)[0].mean(1))

    net, loss_fn = Last(), nn.CrossEntropyLoss()
    x, y = torch.randn(7, 9, 6, dtype=torch.float64), torch.randint(3, (7,))
    plan = anybatch.plan(
        net, loss_fn, (x, y), micro_batch=3, memory="64MiB", offload="file", timed=False
    )
    engine = anybatch.Engine(net, loss_fn, plan=plan)
    for length in (9, 9, 4, 9):
        rows = x[:, :length]
        wanted = undivided(net, loss_fn, rows, y)
        net.zero_grad()
        found = state_of(net, engine.backward(rows, y))
        assert max(error_of(found, wanted).values()) <= tolerance()
        assert engine.last is not None
        net.zero_grad()


RRELU = "aten.rrelu_with_noise"


@pytest.mark.parametrize(
    ("fn", "kernel"),
    [
        (lambda h: F.rrelu(h, training=True), RRELU),
        (lambda h: F.rrelu_(h * 1, training=True), RRELU),
        (lambda h: (h.sin(), h.data.mul_(2))[0], "aten.mul_"),
        (lambda h: (h.sin(), h.unsafe_chunk(2, 1)[1][1:].zero_())[0], "aten.zero_"),
    ],
)
def test_a_write_that_autograd_does_not_count_is_refused(fn: Any, kernel: str) -> None:
    w, off = torch.randn(6, 6, requires_grad=True), anybatch.offload(memory=LOTS, device="cpu")
    for _ in range(2):
        with pytest.raises(NotExactError, match=f"{kernel}.* writes to one afterwards"), off:
            fn(w * 2).sum().backward()
    assert w.grad is None


def test_rrelu_in_a_step_without_an_observer_is_refused_and_in_eval_it_is_right() -> None:
    w, off = torch.randn(6, 6, requires_grad=True), anybatch.offload(memory=LOTS, device="cpu")

    def loss(training: bool | None) -> Tensor:
        h = w * 2
        return (h.sin() if training is None else F.rrelu(h, training=training)).square().sum()

    for training in (None, True, None, False, False, True):  # None: no such layer in that step
        if training:
            with pytest.raises(NotExactError, match="writes to one afterwards"), off:
                loss(training).backward()
            continue
        w.grad = None
        with off:
            loss(training).backward()
        assert w.grad is not None
        assert torch.equal(w.grad, torch.autograd.grad(loss(training), w)[0])


@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm1d(64)])
def test_a_model_that_must_not_send_trains_where_it_fits_without(norm: nn.Module) -> None:
    net = nn.Sequential(nn.Linear(8, 64), norm, nn.RReLU(), nn.Linear(64, 3))
    x, y = torch.randn(512, 8), torch.randint(3, (512,))
    engine = anybatch.Engine(net, nn.CrossEntropyLoss(), memory="512KiB")
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.offload is None
    with pytest.raises(NotExactError, match="give memory for a step without offload"):
        anybatch.plan(net, nn.CrossEntropyLoss(), (x, y), memory="512KiB", offload="file")


def test_a_count_of_writes_is_distinguished_from_another() -> None:
    base = torch.zeros(4, 6)
    a, b = base.unsafe_chunk(2, 1)
    for one, other, same in (
        *((base, base[1:], True), (base, base.detach(), True), (a, a.t(), True)),
        *((a, b, False), (base, a, False), (base, base.data, False), (a, torch.zeros(3), False)),
    ):
        before = one._version, other._version
        assert one_count(probe(one), other) == same
        assert (one._version, other._version) == before


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=4, max_size=4))
def test_what_overlaps_is_found(cuts: list[tuple[int, int]]) -> None:
    storage, other = torch.zeros(4, 8), torch.zeros(4, 8)
    saved = Saved(0, 0, storage, deque())

    def part(of: Tensor, k: int, *, bytes_: bool) -> Tensor:
        (r0, r), (c0, c) = cuts[k : k + 2]
        return (of.view(torch.int16) if bytes_ else of)[r0 : r0 + r, c0 : c0 + c]

    for ways in ((False, False), (True, False), (False, True)):
        other.zero_()
        part(other, 0, bytes_=ways[0]).view(torch.uint8).fill_(1)
        hit = bool(part(other, 2, bytes_=ways[1]).any())
        handle = Handle(saved, part(storage, 0, bytes_=ways[0]))
        assert handle.overlaps(part(storage, 2, bytes_=ways[1])) == hit
