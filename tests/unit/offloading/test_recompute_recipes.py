"""Recipes give what autograd has saved, bit for bit, or there are none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.offloads import slow_link, small_leave
from tests.unit.offloading.steps import (
    LOTS,
    TELLS,
    bounds,
    equal,
    held,
    offloaded,
    plain,
    states,
)
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.errors import NotReproducibleError
from anybatch.offloading import recompute

C = 8

pytestmark = pytest.mark.skipif(
    not TELLS, reason="this torch does not say what hooks have given a node"
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_leave(monkeypatch)
    slow_link(monkeypatch)


def offload(memory: int = LOTS, **options: Any) -> anybatch.reports.Offload:
    return anybatch.offload(memory=memory, device="cpu", **options)


def _norm(class_: type[nn.Module], *arguments: Any) -> nn.Module:
    norm = class_(*arguments)
    for p in norm.parameters():
        nn.init.normal_(p)
    return norm


BATCH, LAYER = _norm(nn.BatchNorm2d, C), _norm(nn.LayerNorm, 6, 1e-6)
GROUP = _norm(nn.GroupNorm, 2, C)
Make = Callable[[Tensor, Tensor], Tensor]

CHEAP: dict[str, Make] = {
    "relu": lambda a, b: (a * a).relu(),
    "batch norm and relu": lambda a, b: BATCH(_saved(a)).relu(),
    "batch norm and relu in place": lambda a, b: BATCH(_saved(a)).relu_(),
    "batch norm, channels last": lambda a, b: BATCH(
        _saved(a).contiguous(memory_format=torch.channels_last)
    ).relu(),
    "group norm": lambda a, b: GROUP(_saved(a)),
    "layer norm": lambda a, b: LAYER(_saved(a)),
    "layer norm alone": lambda a, b: F.layer_norm(_saved(a), (6,)),
    "sum": lambda a, b: torch.add(a.sigmoid(), b.relu(), alpha=0.3),
    "sum over batch norm": lambda a, b: (BATCH(_saved(a)) + b.relu()).relu(),
    "difference": lambda a, b: torch.sub(a.tanh(), b.tanh(), alpha=3),
    "product": lambda a, b: F.silu(a) * b.tanh(),
    "product with a number": lambda a, b: a.sigmoid() * 3,
    "join": lambda a, b: torch.cat([a.sigmoid(), F.gelu(b)], 1),
    "leaky relu": lambda a, b: F.leaky_relu(_saved(a), 0.2),
    "leaky relu in place": lambda a, b: F.leaky_relu_(a * a, 0.2),
    "elu": lambda a, b: F.elu(_saved(a), 0.7),
    "relu6": lambda a, b: F.relu6(_saved(a)),
    "relu6 in place": lambda a, b: F.relu6(a * b, inplace=True),
    "clamp": lambda a, b: _saved(a).clamp(-0.5, 0.4),
    "softplus": lambda a, b: F.softplus(_saved(a), 2, 3),
    "gelu": lambda a, b: F.gelu(_saved(a)),
    "gelu, tanh": lambda a, b: F.gelu(_saved(a), approximate="tanh"),
    "silu": lambda a, b: F.silu(_saved(a)),
    "mish": lambda a, b: F.mish(_saved(a)),
    "hardswish": lambda a, b: F.hardswish(_saved(a)),
    "dropout of an activation": lambda a, b: F.dropout(F.gelu(_saved(a)), 0.3),
    "dropout as a GPU has it": lambda a, b: torch.native_dropout(_saved(a).tanh(), 0.3, True)[0],
    "max pool": lambda a, b: F.max_pool2d(a.tanh(), 2),
    "average pool": lambda a, b: F.avg_pool2d(_saved(a), 3, 1, 1, count_include_pad=False),
    "larger, nearest": lambda a, b: F.interpolate(a.tanh(), scale_factor=2),
    "larger, bilinear": lambda a, b: F.interpolate(a.tanh(), (9, 8), mode="bilinear"),
    "cast": lambda a, b: a.tanh().double(),
    "transposed": lambda a, b: F.silu(_saved(a)).transpose(-1, -2),
    "permuted and copied": lambda a, b: a.tanh().permute(0, 2, -1, 1).contiguous(),
    "viewed": lambda a, b: F.gelu(_saved(a)).view(-1, 36),
    "a slice, copied": lambda a, b: F.silu(a.tanh()[:, 1:, ::2]),
    "a part of a split": lambda a, b: F.silu(a.tanh().split(3, 1)[1]),
    "softmax of something, masked": lambda a, b: a.softmax(1) * b.sigmoid(),
    "softmax": lambda a, b: _saved(a).mul(b.sigmoid()).softmax(-1),
    "quotient": lambda a, b: a.sigmoid() / b.exp(),
    "negative": lambda a, b: F.silu(-a.tanh()),
    "exponential": lambda a, b: a.tanh().exp(),
    "inverse root": lambda a, b: F.silu(a.sigmoid().rsqrt()),
    "power": lambda a, b: F.silu(a.tanh().pow(3)),
    "mean": lambda a, b: F.silu(torch.stack([_saved(a)] * 2).mul(3).mean(0)),
    "gated": lambda a, b: F.glu(torch.cat([a.tanh(), b.tanh()], 1), 1),
    "a product of matrices": lambda a, b: _saved(a) @ b.sin(),
    "a product and a sum": lambda a, b: torch.baddbmm(
        a.tanh().flatten(0, 1), _saved(a).flatten(0, 1), b.sin().flatten(0, 1), beta=0.3, alpha=0.7
    ),
    "a linear layer": lambda a, b: F.linear(_saved(a), KERNEL[:6, :6, 0, 0], BIAS[:6]),
    "a linear layer without a bias": lambda a, b: F.linear(_saved(a), KERNEL[:6, :6, 0, 0]),
    "linear layers one after another": lambda a, b: F.gelu(
        F.linear(_saved(a), KERNEL[:6, :6, 0, 0])
    ) * F.linear(_saved(b), KERNEL[:6, :6, 0, 0]),
    "a convolution": lambda a, b: F.conv2d(_saved(a), KERNEL, BIAS, padding=1),
    "a grouped, dilated convolution without a bias": lambda a, b: F.conv2d(
        _saved(a), KERNEL[:, :2], padding=2, dilation=2, groups=4
    ),
    "a transposed convolution": lambda a, b: F.conv_transpose2d(_saved(a), KERNEL, BIAS, stride=2),
    "convolution, batch norm, relu": lambda a, b: BATCH(F.conv2d(_saved(a), KERNEL)).relu(),
    "attention": lambda a, b: F.scaled_dot_product_attention(
        _saved(a), _saved(b), a.sin(), is_causal=True, scale=0.3
    ),
    "attention with a mask": lambda a, b: F.scaled_dot_product_attention(
        _saved(a), _saved(b), a.sin(), attn_mask=MASK
    ),
    "attention by hand": lambda a, b: (
        (_saved(a) @ _saved(b).transpose(-1, -2) / 2.5).softmax(-1) @ b.sin()
    ),
    "turned by position": lambda a, b: _turned(F.linear(_saved(a), KERNEL[:6, :6, 0, 0])).tanh(),
    "what two operations take": lambda a, b: _twice(_saved(a).tanh().neg()),
    "parts, with another dimension": lambda a, b: torch.cat(
        [part.unsqueeze(1) for part in a.tanh().unbind(1)], 1
    ),
    "parts, selected and squeezed": lambda a, b: torch.cat(
        [a.tanh()[:, 2:], b.tanh().select(1, 3)[:, None], b.tanh()[:, :1].squeeze(1).unsqueeze(1)],
        1,
    ),
    "parts of one product": lambda a, b: _mixed(
        *F.linear(_saved(a), KERNEL.flatten()[:108].view(18, 6)).chunk(3, -1)
    ),
}  # fmt: skip


KERNEL, BIAS = (nn.Parameter(torch.randn(s)) for s in ((C, C, 3, 3), (C,)))
MASK, COSINE, SINE = torch.randn(3, 6, 6)


def _twice(a: Tensor) -> Tensor:
    """Return a sum of which one part would be written over, if it were not needed again."""
    return F.silu(torch.add(torch.add(a, a.exp()), a))


def _written(a: Tensor) -> Tensor:
    """Return something that was written to through a view."""
    found = F.silu(a)
    found[:, 1].mul_(2)
    return found


def _mixed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return a product of three parts, of which the storage of all is saved."""
    return q * k * v


def _turned(a: Tensor) -> Tensor:
    """Return positions turned by angles, as language models do; both terms are of one product."""
    halves = torch.cat([-a[..., 3:], a[..., :3]], -1)
    return a * COSINE + halves * SINE


def _saved(a: Tensor) -> Tensor:
    """Something that its user saves, and that is not cheap itself."""
    return a.cos()


DEAR: dict[str, Make] = {
    "a convolution with a bias that no node knows": lambda a, b: F.conv2d(
        _saved(a), KERNEL, BIAS.detach()
    ),
    "a product with a bias that no node knows": lambda a, b: F.linear(
        _saved(a), KERNEL[:6, :6, 0, 0], BIAS[:6].detach()
    ),
    "no rule": lambda a, b: a.cos(),
    "a draw": lambda a, b: F.dropout(a.cos(), 0.5),
    "a number that no node knows": lambda a, b: a.tanh() + 1.0,
    "padding whose value no node knows": lambda a, b: F.pad(a.tanh(), (1, 1), value=2.0),
    "a tensor without gradient": lambda a, b: a.tanh() + b.detach(),
    "batch norm with running statistics": lambda a, b: F.batch_norm(
        _saved(a), BATCH.running_mean, BATCH.running_var, BATCH.weight, BATCH.bias
    ),
    "batch norm with a bias that no node knows": lambda a, b: F.batch_norm(
        _saved(a), None, None, BATCH.weight, BATCH.bias.detach(), training=True
    ),
    "what was written to": lambda a, b: _written(_saved(a)),
    "expanded": lambda a, b: a.tanh()[:, :1].expand(-1, C, -1, -1),
}  # fmt: skip


class _Step(nn.Module):
    """A result that is saved for backward, and others after it that are not cheap."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make = make
        self.a, self.b = (nn.Parameter(torch.randn(4, C, 6, 6)) for _ in range(2))

    def forward(self) -> Tensor:
        made = self.make(self.a + 0.0, self.b + 0.0)
        return made.cos().sin().cos().sin().cos().sin().sum()


def _backward(model: nn.Module) -> None:
    model().backward()


def _tried(model: nn.Module) -> list[tuple[int, int]]:
    """Return (bytes, sources) of all that was made again in a recorded step."""
    off = offload()
    with off:
        _backward(model)
    (recorded,) = off._cache.recorded.values()
    found = recorded.recording.remakes
    return [(recorded.recording.sizes[k], len(one.sources)) for k, one in found.items()]


@pytest.mark.parametrize("name", CHEAP)
def test_cheap_results_are_made_again_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    model = _Step(CHEAP[name])
    torch.manual_seed(2)
    with torch.no_grad():
        size = model.make(model.a + 0.0, model.b + 0.0).nbytes
    assert size in [bytes_ for bytes_, _ in _tried(model)]
    wanted = plain(model, _backward, 3)
    off = offload(_budget(model, _backward))
    assert all(map(equal, offloaded(model, _backward, off, 3), wanted))
    assert off.last is not None
    assert off.last.mode == "planned"
    assert off.last.remade_bytes > 0


@pytest.mark.parametrize("name", DEAR)
def test_where_anything_else_comes_in_there_is_no_recipe(name: str) -> None:
    torch.manual_seed(0)
    model = _Step(DEAR[name])
    assert _tried(model) == []
    wanted = plain(model, _backward, 3)
    low, high = bounds(model, _backward)
    off = offload((low + high) // 2)
    assert all(map(equal, offloaded(model, _backward, off, 3), wanted))


def test_what_a_node_of_this_torch_does_not_save_is_no_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        recompute.RULES, "GeluBackward0", recompute.Rule(torch.relu, constants=("later",))
    )
    torch.manual_seed(0)
    model = _Step(lambda a, b: F.gelu(_saved(a)))
    assert _tried(model) == []
    wanted = plain(model, _backward, 2)
    assert all(map(equal, offloaded(model, _backward, offload(), 2), wanted))


class _Units(nn.Module):
    """Convolution, batch normalisation, activation; its constants may change."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(C, C, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(C) for _ in range(depth))
        self.slope, self.alpha, self.act = 0.1, 1.0, F.leaky_relu

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = self.act(norm(conv(x)), self.slope)
            x = torch.add(h.sigmoid(), h.tanh(), alpha=self.alpha)
        return x


def _units(depth: int = 4) -> tuple[_Units, Tensor]:
    torch.manual_seed(0)
    return _Units(depth), torch.randn(5, C, 6, 6)


def _budget(model: nn.Module, step: Callable[[nn.Module], Any]) -> int:
    low, high = bounds(model, step)
    return (low + high) // 2


def test_constants_are_those_of_the_step() -> None:
    model, x = _units()

    def step(ours: nn.Module) -> None:
        assert isinstance(ours, _Units)
        ours(x).square().sum().backward()
        ours.slope, ours.alpha = ours.slope * 1.5, ours.alpha - 0.3
        for norm in ours.norms:
            norm.eps *= 3

    off = offload(_budget(model, step))
    wanted = plain(model, step, 4)
    assert not any(equal(*pair) for pair in pairwise(wanted))
    assert all(map(equal, offloaded(model, step, off, 4), wanted))
    assert off.last is not None
    assert off.last.mode == "planned"
    assert off.last.remade_bytes > 0


def test_another_operation_in_the_same_place_is_done_again_or_all_leaves() -> None:
    model, x = _units()
    off = offload(_budget(model, lambda ours: ours(x).sum().backward()))
    others = (F.leaky_relu, F.leaky_relu, F.elu, _odd, F.elu, F.leaky_relu)
    for act, variant in zip(others, ("recorded", *["planned"] * 2, "on demand"), strict=False):
        model.act = act
        wanted = plain(model, lambda ours: ours(x).sum().backward(), 1)[0]
        ours = copy.deepcopy(model)
        ours.zero_grad()
        with off:
            ours(x).sum().backward()
        assert equal(states(ours), wanted)
        assert off.last is not None
        assert off.last.mode == variant


def _odd(x: Tensor, slope: float) -> Tensor:
    """As much is saved in as many places, but nobody knows how to do it again."""
    return _Odd.apply(x) * 1  # type: ignore[no-any-return]


class _Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.saved_tensors  # noqa: B018
        return grad * 2


def test_an_epsilon_of_ones_own_is_right_or_ends_in_an_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C)) for _ in range(4)))
    x = torch.randn(30, C)

    def step(ours: nn.Module) -> None:
        ours(x).cos().sum().backward()

    off, errors = offload(_budget(model, step)), 0
    for eps in (1e-5, 1e-5, 0.25, 0.25, 0.25):
        for layer in model:
            assert isinstance(layer, nn.Sequential)
            layer[1].eps = eps  # type: ignore[assignment]
        try:
            found = offloaded(model, step, off, 1)[0]
        except NotReproducibleError:
            errors += 1
            continue
        assert equal(found, plain(model, step, 1)[0])
    assert errors <= 1
    assert off.last is not None
    assert not (errors and off.last.remade_bytes)


def test_batch_statistics_are_updated_once() -> None:
    model, x = _units()
    for norm in model.norms:
        norm.momentum = None

    def step(ours: nn.Module) -> None:
        ours(x).sum().backward()

    off, ours = offload(_budget(model, step)), copy.deepcopy(model)
    theirs = copy.deepcopy(model)
    for count in range(1, 4):
        with off:
            step(ours)
        step(theirs)
        assert equal(states(ours), states(theirs))
        assert all(norm.num_batches_tracked == count for norm in ours.norms)
    assert off.last is not None
    assert off.last.remade_bytes > 0


def test_switched_off_nothing_is_tried() -> None:
    model, x = _units()
    off = offload(_budget(model, lambda ours: ours(x).sum().backward()), recompute=False)
    for _ in range(2):
        with off:
            model(x).sum().backward()
        model.zero_grad()
    (recorded,) = off._cache.recorded.values()
    assert recorded.recording.remakes == {}
    assert off.last is not None
    assert (off.last.remade_bytes, off.last.out_bytes > 0) == (0, True)


def test_what_is_tried_stays_within_the_budget() -> None:
    model, x = _units()

    def step(ours: nn.Module) -> None:
        ours(x).sum().backward()

    low, high = bounds(model, step)
    counts = []
    for memory in range(low, high + 1, (high - low) // 7):
        off, ours = offload(memory), copy.deepcopy(model)

        def once(off: Any = off, ours: nn.Module = ours) -> None:
            with off:
                step(ours)

        most = held(ours, (x,), once)
        assert off.last is not None
        assert off.last.predicted_bytes is not None
        assert most <= off.last.predicted_bytes <= memory
        (recorded,) = off._cache.recorded.values()
        counts.append(len(recorded.recording.remakes))
    assert counts[0] < counts[-1]


def test_a_write_behind_autograds_back_leaves_no_recipe() -> None:
    model, x = _units()

    class Clamped(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            with torch.no_grad():
                h.clamp_(-9, 9)
            return h

    full = nn.Sequential(model.convs[0], model.norms[0], Clamped(), nn.ReLU(), model.convs[1])
    off = offload()
    with off:
        full(x).sum().backward()
    (recorded,) = off._cache.recorded.values()
    assert recorded.recording.remakes == {}


@pytest.mark.parametrize("what", ["source", "bias"])
def test_a_write_to_what_it_is_made_from_is_found(what: str) -> None:
    model, x = _units(2)

    def step(*, writes: bool) -> None:
        retained = model.convs[0](x)
        loss = model.convs[1](model.norms[0](retained).relu()).cos().sin().cos().sin().cos().sum()
        if writes:
            with torch.no_grad():
                (retained if what == "source" else model.norms[0].bias).add_(1)
        loss.backward()

    off = offload(_budget(model, lambda ours: step(writes=False)))
    for writes in (False, False, True):
        found = pytest.raises(RuntimeError, match="modified by an inplace operation")
        with found if writes else nullcontext(), off:
            step(writes=writes)
        model.zero_grad()
    assert off.last is not None
    assert off.last.remade_bytes > 0


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_after_an_error_the_next_step_is_right(at: str) -> None:
    model, x = _units()

    def step(ours: nn.Module) -> None:
        ours(x).sum().backward()

    off, wanted = offload(_budget(model, step)), plain(model, step, 1)[0]
    for fails in (False, True, False, True, False):
        ours = copy.deepcopy(model)
        where = ours.convs[2]
        hook = where.register_forward_hook if at == "forward" else where.weight.register_hook
        handle = hook(_raises)
        if not fails:
            handle.remove()
        try:
            with off:
                step(ours)
        except KeyboardInterrupt:
            assert fails
        else:
            assert equal(states(ours), wanted)
    assert off.last is not None
    assert off.last.remade_bytes > 0


def _raises(*_arguments: Any) -> None:
    raise KeyboardInterrupt


def test_a_graph_that_is_retained_autocast_and_backward_after_the_step() -> None:
    model, x = _units()

    def twice(ours: nn.Module) -> None:
        loss = ours(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def cast(ours: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = ours(x).float().sum()
        loss.backward()

    def penalty(ours: nn.Module) -> None:
        inputs = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(ours(inputs).sum(), inputs, create_graph=True)
        grad.square().sum().backward()

    for step in (twice, cast, penalty):
        off = offload(_budget(model, step))
        assert all(map(equal, offloaded(model, step, off, 3), plain(model, step, 3)))
        assert off.last is not None
        assert off.last.mode == "planned"
        if step is not penalty:  # its graph holds everything to the end
            assert off.last.remade_bytes > 0

    def one_backward(ours: nn.Module) -> None:
        ours(x).sum().backward()

    off, wanted = offload(_budget(model, one_backward)), plain(model, one_backward, 1)[0]
    for inside in (True, True, False):
        ours = copy.deepcopy(model)
        with off:
            loss = ours(x).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert equal(states(ours), wanted)
