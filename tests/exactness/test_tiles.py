"""Modules of single tokens in tiles: the gradient of the whole; all others are left whole."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, error_of, same, snapshot, state_of, undivided
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch import Engine, Plan
from anybatch.execution import tiles
from anybatch.execution.tiles import Tiles
from anybatch.reports import Evidence, Memory

D, WIDE, LONG, TILE = 8, 64, 50, 16


def plan_of(micro_batch: int = 1, tile: int = TILE, chunked: int = 0) -> Plan:
    memory = Memory(1 << 40, "as given", 1, (), None, 1, "", chunked=chunked, tile=tile)
    return Plan(micro_batch, "streaming", "in place", "", Evidence("shown", ""), (), memory)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Receive the classes of the modules that were called with tokens, and whether in tiles."""
    found: dict[str, bool] = {}
    own = Tiles._verdict

    def verdict(self: Tiles, module: nn.Module, x: Tensor, rows: int) -> Any:
        one, name = own(self, module, x, rows), type(module).__name__
        found[name] = one.tokenwise or found.get(name, False)
        return one

    monkeypatch.setattr(Tiles, "_verdict", verdict)
    return found


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class SwiGLU(nn.Module):
    def __init__(self, wide: int = WIDE) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(D, wide, bias=False), nn.Linear(D, wide, bias=False)
        self.down = nn.Linear(wide, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return found


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, WIDE), nn.Linear(WIDE, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.dropout(self.down(torch.tanh(F.gelu(self.up(x)))))
        return found


class Writing(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Experts(nn.Module):
    """Each token goes to one expert, which Python chooses by values."""

    def __init__(self, capacity: float = 0.0) -> None:
        super().__init__()
        self.router, self.capacity = nn.Linear(D, 4), capacity
        self.experts = nn.ModuleList(SwiGLU(32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, D)
        weight, chosen = self.router(rows).softmax(-1).max(-1)
        most = int(self.capacity * len(rows) / 4) if self.capacity else len(rows)
        found = torch.zeros_like(rows)
        for at, expert in enumerate(self.experts):
            mine = (chosen == at).nonzero()[:most, 0]
            found = found.index_add(0, mine, expert(rows[mine]) * weight[mine, None])
        return found.view(x.shape)


class Attention(nn.Module):
    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(D, 3 * D), nn.Linear(D, D), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(found)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module], mixer: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.before, self.after, self.mixer, self.mlp = norm(), norm(), mixer, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.before(x))
        return x + self.mlp(self.after(x))  # type: ignore[no-any-return]


class Language(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(90, D)
        self.layers = nn.Sequential(layer(), layer())
        self.head = nn.Linear(D, 90, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(x)))  # type: ignore[no-any-return]


class Pixels(nn.Module):
    """As a ViT (patches in a row) or a ConvNeXt (pixels in two dimensions, channels last)."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.patches, self.flat, self.head = nn.Conv2d(3, D, 2, 2), flat, nn.Linear(D, 5)
        self.mixer: nn.Module = Attention(causal=False) if flat else nn.Conv2d(D, D, 3, padding=1)
        self.mlp = nn.Sequential(nn.LayerNorm(D), MLP())

    def forward(self, x: Tensor) -> Tensor:
        z = self.patches(x)
        if self.flat:
            z = z.flatten(2).transpose(1, 2)
            z = z + self.mixer(z)
        else:
            z = (z + self.mixer(z)).permute(0, 2, 3, 1)
        return self.head((z + self.mlp(z)).flatten(1, -2).mean(1))  # type: ignore[no-any-return]


def of_tokens(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=3)


def words(length: int, n: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randint(90, (n, length)), torch.randint(90, (n, length))


def images(length: int, n: int = 3) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, length // 2 * 2, 20, dtype=torch.float64)
    return x, torch.randint(5, (n,))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any, Any, set[str]]] = {
    "llama": (
        lambda: Language(lambda: Layer(RMSNorm, Attention(), SwiGLU())),
        *(words, of_tokens, {"SwiGLU"}),
    ),
    "gpt2": (
        lambda: Language(lambda: Layer(lambda: nn.LayerNorm(D), Attention(), MLP())),
        *(words, of_tokens, {"MLP"}),
    ),
    "mixtral": (
        lambda: Language(lambda: Layer(RMSNorm, Attention(), Experts())),
        *(words, of_tokens, set()),
    ),
    "vit": (lambda: Pixels(flat=True), images, F.cross_entropy, {"Sequential"}),
    "convnext": (lambda: Pixels(flat=False), images, F.cross_entropy, {"Sequential"}),
}


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize("name", [*NETWORKS])
def test_a_network_in_tiles_has_the_gradient_of_the_batch(
    name: str, micro_batch: int, tried: dict[str, bool]
) -> None:
    make, batch, loss_fn, expected = NETWORKS[name]
    torch.manual_seed(0)
    net = make().double()
    engine = Engine(net, loss_fn, plan=plan_of(micro_batch))
    for length in (LONG, LONG, 2 * TILE + 1, TILE, 40):  # ragged, one tile, another length
        x, y = batch(length)
        net.zero_grad()
        want = undivided(net, loss_fn, x, y)
        assert_exact(state_of(net, engine.backward(x, y)), want)
    assert {one for one, tiled in tried.items() if tiled} == expected
    assert not any("forward" in module.__dict__ for module in net.modules())


def test_evaluation_is_in_tiles_too(tried: dict[str, bool]) -> None:
    make, batch, loss_fn, _ = NETWORKS["llama"]
    net = make().double()
    x, y = batch(LONG)
    engine = Engine(net, loss_fn, plan=plan_of())
    want = loss_fn(net(x), y).detach()
    assert_exact({"loss": engine.evaluate(x, y)}, {"loss": want})
    assert tried["SwiGLU"]


class Block(nn.Module):
    """A module on a residual stream, and what comes before and after it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.before, self.module, self.after = nn.Linear(D, D), module, nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.before(x)
        return self.after(z + self.module(z)).mean(1)  # type: ignore[no-any-return]


class Of(nn.Module):
    """A function beside a wide inside, which alone would be in tiles."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(D, WIDE), nn.Linear(WIDE, D), function
        self.table, self.weight = (
            nn.Parameter(torch.randn(2 * LONG, D)),
            nn.Parameter(torch.ones(D)),
        )
        self.log: list[Any] = []
        self.count, self.kept = 0, torch.zeros(())
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        z = self.down(torch.tanh(F.gelu(self.up(x))))
        return self.function(self, x, z)  # type: ignore[call-arg]


def causal(_: Of, x: Tensor, z: Tensor) -> Tensor:
    kernel = torch.ones(D, 1, 3, dtype=x.dtype)
    return z + F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), kernel, groups=D).transpose(1, 2)


def squeeze_excite(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z * torch.sigmoid(x.mean(1, keepdim=True))


def token_shift(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z + F.pad(x[:, :-1], (0, 0, 1, 0))


def response_norm(self: Of, x: Tensor, z: Tensor) -> Tensor:
    norm = x.norm(dim=1, keepdim=True)
    return z + self.weight * x * norm / (norm.mean(-1, keepdim=True) + 1e-6)


def closed_gate(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z + 0 * x.mean(1, keepdim=True)


def weakly(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z + 1e-9 * x.sum(1, keepdim=True)


def when_long(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z - 0.1 * x.mean(1, keepdim=True) if x.shape[1] > 2 * TILE else z


def by_length(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z / x.shape[1]


def positions(self: Of, x: Tensor, z: Tensor) -> Tensor:
    return z * self.table[: x.shape[1]]


def counted(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z * torch.arange(x.shape[1], dtype=x.dtype)[:, None]


def read(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z if float(x.detach().mean()) > 1e3 else 2 * z


def cumulative(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z + x.cumsum(1)


def largest(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z.gather(1, x.argsort(1))


def over_tokens(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z * x.softmax(1)


def normalised(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z + F.instance_norm(x.transpose(1, 2)).transpose(1, 2)


def last(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z + x[:, -1:]


def tenth(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z + x[:, 10:11] if x.shape[1] > 10 else z


def every_second(_: Of, x: Tensor, z: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], dtype=x.dtype)
    mask[::2] = 0
    return z * mask[:, None]


def pairs(_: Of, x: Tensor, z: Tensor) -> Tensor:
    even = x.shape[1] % 2 == 0
    return z.unflatten(1, (-1, 2)).softmax(2).flatten(1, 2) if even else z


def half(_: Of, x: Tensor, z: Tensor) -> Tensor:
    places = x.norm(dim=-1).topk(max(1, x.shape[1] // 2), 1).indices
    return z * torch.zeros_like(z[..., 0]).scatter(1, places, 1.0)[..., None]


def dropped(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return F.dropout(z, 0.5, training=True)


def drawn(_: Of, x: Tensor, z: Tensor) -> Tensor:
    return z * torch.rand(())


def moves(self: Of, x: Tensor, z: Tensor) -> Tensor:
    self.mean.add_(1)
    return z * self.mean


def counts(self: Of, x: Tensor, z: Tensor) -> Tensor:
    self.count += 1
    return z * self.count


def keeps(self: Of, x: Tensor, z: Tensor) -> Tensor:
    self.kept = z.detach()
    return z


def logs(self: Of, x: Tensor, z: Tensor) -> Tensor:
    self.log.append(x.shape)
    return z


class Registry:
    """Something that forward puts values into, for a loss outside."""

    last: Any = None
    every: list[Any] = []  # noqa: RUF012


REGISTRY, CALLS = Registry(), {"count": 1}


def registers(_: Of, x: Tensor, z: Tensor) -> Tensor:
    REGISTRY.last = x.mean()
    return z


def appends(_: Of, x: Tensor, z: Tensor) -> Tensor:
    REGISTRY.every.append(x.mean())
    return z


def counts_outside(_: Of, x: Tensor, z: Tensor) -> Tensor:
    CALLS["count"] += 1
    return z * CALLS["count"]


def checkpointed(_: Of, x: Tensor, z: Tensor) -> Tensor:
    found: Tensor = checkpoint(torch.sin, z, use_reentrant=True)
    return found


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Tensor:
        return 2 * above / above.shape[1] * LONG


def own_backward(_: Of, x: Tensor, z: Tensor) -> Tensor:
    found: Tensor = Doubled.apply(z)  # type: ignore[no-untyped-call]
    return found


WHOLE = [
    *(
        causal,
        squeeze_excite,
        token_shift,
        response_norm,
        closed_gate,
        weakly,
        when_long,
        by_length,
    ),
    *(
        positions,
        counted,
        read,
        cumulative,
        largest,
        last,
        tenth,
        every_second,
        pairs,
        half,
        over_tokens,
        normalised,
        dropped,
        drawn,
    ),
    *(moves, counts, keeps, logs, registers, appends, checkpointed, own_backward),
]


def compared(
    net: nn.Module, x: Tensor, *, tile: int = TILE, times: int = 2
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what calls of a network leave, whole and in tiles."""
    found = []
    of_tiles = Tiles(tile)
    for run in (lambda model, call: call(), of_tiles.run):
        torch.manual_seed(1)
        model, rows, total = copy.deepcopy(net), x.clone().requires_grad_(), torch.zeros(())
        for _ in range(times):
            loss = run(model, lambda model=model, rows=rows: model(rows)).square().sum()
            loss.backward()
            total = total + loss.detach()
        assert rows.grad is not None
        found.append(state_of(model, total) | {"x.grad": rows.grad})
    return found[0], found[1]


@pytest.mark.parametrize("function", WHOLE, ids=lambda one: one.__name__)
def test_a_module_of_more_than_single_tokens_is_left_whole(
    function: Any, tried: dict[str, bool]
) -> None:
    torch.manual_seed(0)
    net = Block(Of(function)).double()
    want, got = compared(net, torch.randn(2, LONG, D, dtype=torch.float64))
    assert not tried["Of"]
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    "module",
    [
        lambda: Experts(1.0),
        Writing,
        lambda: nn.GRU(D, D, batch_first=True),
        lambda: nn.TransformerEncoderLayer(D, 2, WIDE, 0.0, batch_first=True),
        lambda: nn.Sequential(nn.Linear(D, WIDE), nn.Dropout(0.1), nn.Tanh(), nn.Linear(WIDE, D)),
    ],
)
def test_layers_in_which_tokens_meet_or_draw_are_left_whole(
    module: Callable[[], nn.Module], tried: dict[str, bool]
) -> None:
    torch.manual_seed(0)
    inner = module()
    name = type(inner).__name__
    net = Block(inner if name != "GRU" else First(inner)).double()
    want, got = compared(net, torch.randn(2, LONG, D, dtype=torch.float64))
    assert not tried["First" if name == "GRU" else name]
    assert_exact(got, want)


class First(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)[0]  # type: ignore[no-any-return]


def test_what_a_module_counts_elsewhere_is_not_counted_by_a_trial(tried: dict[str, bool]) -> None:
    net = Block(Of(counts_outside)).double()
    x = torch.randn(2, LONG, D, dtype=torch.float64)
    CALLS["count"] = 1
    Tiles(TILE).run(net, lambda: net(x))
    assert CALLS["count"] == 2
    assert not tried["Of"]


def test_an_mlp_that_is_wider_than_a_head_is_not_in_chunks_but_in_tiles(
    tried: dict[str, bool],
) -> None:
    torch.manual_seed(0)
    net = Language(lambda: Layer(RMSNorm, Attention(), SwiGLU(16 * D))).double()
    x, y = words(LONG)
    engine = Engine(net, of_tokens, plan=plan_of(1, chunked=16 * 90 * 8))
    for _ in range(2):
        net.zero_grad()
        want = undivided(net, of_tokens, x, y)
        assert_exact(state_of(net, engine.backward(x, y)), want)
    assert tried["SwiGLU"]


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = MLP(), nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.mlp(x).transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


@pytest.mark.parametrize("trains", [True, False])
def test_batch_norm_over_tokens_is_left_whole_while_it_trains(
    tried: dict[str, bool], *, trains: bool
) -> None:
    torch.manual_seed(0)
    net = Block(BatchNormed()).double().train(trains)
    want, got = compared(net, torch.randn(2, LONG, D, dtype=torch.float64))
    assert tried["BatchNormed"] == (not trains)
    assert_exact(got, want)


def mlp_block() -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    return Block(MLP()).double(), torch.randn(2, LONG, D, dtype=torch.float64)


def drop(net: Block) -> None:
    net.module.dropout.p = 0.5  # type: ignore[union-attr]


def replace(net: Block) -> None:
    net.module.forward = lambda x: x * x.mean(1, keepdim=True)  # type: ignore[method-assign]


def hook(net: Block) -> None:
    net.module.up.register_forward_hook(lambda *a: a[-1] * len(a[-1][0]))  # type: ignore[union-attr]


def reflag(net: Block) -> None:
    net.module.down = nn.Sequential(First(nn.GRU(WIDE, D, batch_first=True))).double()


@pytest.mark.parametrize("change", [drop, replace, hook, reflag], ids=lambda one: one.__name__)
def test_a_module_that_changes_between_steps_is_tried_again(
    change: Callable[[Block], None], tried: dict[str, bool]
) -> None:
    net, x = mlp_block()
    of_tiles = Tiles(TILE)
    of_tiles.run(net, lambda: net(x)).sum().backward()
    assert tried["MLP"]
    tried.clear()
    net.zero_grad()
    change(net)
    torch.manual_seed(3)
    loss = of_tiles.run(net, lambda: net(x)).square().sum()
    loss.backward()
    got = state_of(net, loss)
    net.zero_grad()
    torch.manual_seed(3)
    loss = net(x).square().sum()
    loss.backward()
    assert_exact(got, state_of(net, loss))
    assert not tried.get("MLP")


class Scaled(MLP):
    """Computes with what its parent sets before each call, by the name of the change."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.table, self.held = 1.0, {"scale": 1.0}, SimpleNamespace(scale=1.0)
        self.held.tensor, self.function = torch.ones(1).double(), torch.tanh
        self.condition: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x) * self.scale * self.table["scale"] * self.held.scale
        z = self.function(z * OUTSIDE["scale"] * Scaled.factor) * self.held.tensor
        return z if self.condition is None else z * self.condition


OUTSIDE = {"scale": 1.0}
ANOTHER: dict[str, Callable[[Scaled, float], object]] = {
    "a number": lambda module, a: setattr(module, "scale", a),
    "an entry": lambda module, a: module.table.update(scale=a),
    "a number in an object": lambda module, a: setattr(module.held, "scale", a),
    "a number of the class": lambda _, a: setattr(Scaled, "factor", a),
    "a global number": lambda _, a: OUTSIDE.update(scale=a),
    "a tensor": lambda module, a: setattr(module, "condition", torch.full((1, D), a).double()),
    "a tensor in an object": lambda module, a: setattr(
        module.held, "tensor", torch.full((1,), a).double()
    ),
    "a function": lambda module, a: setattr(module, "function", torch.sin if a > 1 else torch.tanh),
    "data": lambda module, a: setattr(module.up.weight, "data", module.up.weight.data * a),
}


class Twice(nn.Module):
    """Calls one module twice, changes it before each call, and undoes the changes at the end."""

    def __init__(self, change: Callable[[Scaled, float], object]) -> None:
        super().__init__()
        self.block, self.head, self.change = Scaled(), nn.Linear(D, 2), change

    def forward(self, x: Tensor) -> Tensor:
        for factor in (0.5, 4.0):
            self.change(self.block, factor)
            x = x + self.block(x)
        self.change(self.block, 0.5)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Frozen(nn.Module):
    """Calls one module with its own parameters, and with a copy that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = MLP(), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        copied = {name: one.detach() / 2 for name, one in self.block.named_parameters()}
        x = self.block(x)
        return self.head((x + functional_call(self.block, copied, (x,))).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", [*ANOTHER, "parameters"])
def test_backward_computes_a_module_as_it_was_called(change: str) -> None:
    torch.manual_seed(0)
    net = (Frozen() if change == "parameters" else Twice(ANOTHER[change])).double()
    x, y = torch.randn(3, LONG, D, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    engine = Engine(net, F.mse_loss, plan=plan_of(2))
    for _ in range(2):
        net.zero_grad()
        want = undivided(net, F.mse_loss, x, y)
        assert_exact(state_of(net, engine.backward(x, y)), want)
    ANOTHER["a number of the class"](Scaled(), 1.0)
    ANOTHER["a global number"](Scaled(), 1.0)


def test_a_draw_that_was_not_there_when_a_module_was_tried_is_no_other_draw() -> None:
    class Sometimes(MLP):
        def forward(self, x: Tensor) -> Tensor:
            z = super().forward(x)
            return z * torch.rand_like(z) if DRAWS["on"] else z

    DRAWS = {"on": False}
    torch.manual_seed(0)
    net = Block(Sometimes()).double()
    x, y = torch.randn(2, LONG, D, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    engine = Engine(net, F.mse_loss, plan=plan_of(2))
    engine.backward(x, y)
    for on in (True, False, True):
        DRAWS["on"] = on
        net.zero_grad()
        torch.manual_seed(5)
        want = undivided(net, F.mse_loss, x, y)
        torch.manual_seed(5)
        assert_exact(state_of(net, engine.backward(x, y)), want)


def test_dropout_draws_as_in_one_piece() -> None:
    torch.manual_seed(0)
    net = Block(MLP(0.4)).double()
    x, y = torch.randn(2, LONG, D, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    engine = Engine(net, F.mse_loss, plan=plan_of(2))
    for seed in range(3):
        net.zero_grad()
        torch.manual_seed(seed)
        want = undivided(net, F.mse_loss, x, y)
        torch.manual_seed(seed)
        assert_exact(state_of(net, engine.backward(x, y)), want)


class Adapted(nn.Module):
    """A frozen linear map and a trained one of low rank."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.of = of.requires_grad_(requires_grad=False)
        self.a = nn.Parameter(torch.randn(2, of.in_features, dtype=torch.float64) / 4)
        self.b = nn.Parameter(torch.randn(of.out_features, 2, dtype=torch.float64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x) + x @ self.a.t() @ self.b.t()  # type: ignore[no-any-return]


def lora(net: nn.Module) -> None:
    net.requires_grad_(requires_grad=False)
    for module in net.modules():
        if isinstance(module, SwiGLU):
            module.up, module.down = Adapted(module.up), Adapted(module.down)


def tied(net: nn.Module) -> None:
    first, second = (module for module in net.modules() if isinstance(module, SwiGLU))
    first.gate.weight = first.up.weight
    second.up.weight = first.up.weight


def outside(net: nn.Module) -> None:
    """One computes with a parameter of the other, which it does not list."""
    first, second = (module for module in net.modules() if isinstance(module, SwiGLU))
    weight = first.up.weight
    second.gate = Of(lambda self, x, z: F.linear(x, weight)).double()


def clamped(net: nn.Module) -> None:
    for p in net.parameters():
        p.register_hook(lambda g: g.clamp(-1e-3, 1e-3))


def recomputed(net: nn.Module) -> None:
    for layer in net.layers:  # type: ignore[union-attr]
        own = layer.forward
        layer.forward = lambda x, own=own: checkpoint(own, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("change", "tiled"),
    [(lora, True), (tied, True), (outside, True), (clamped, True), (recomputed, False)],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
def test_other_parameters_hooks_and_checkpoints_beside_tiles(
    change: Callable[[nn.Module], None], tried: dict[str, bool], *, tiled: bool
) -> None:
    make, batch, loss_fn, _ = NETWORKS["llama"]
    torch.manual_seed(0)
    net = make().double()
    change(net)
    x, y = batch(LONG)
    engine = Engine(net, loss_fn, plan=plan_of(2))
    for _ in range(2):
        net.zero_grad()
        plain = make().double()
        change(plain)
        plain.load_state_dict(net.state_dict())
        loss = loss_fn(plain(x), y)
        loss.backward()
        want = state_of(plain, loss)
        assert_exact(state_of(net, engine.backward(x, y)), want)
    assert tried.get("SwiGLU", False) == tiled


def test_a_parameter_outside_of_a_module_gets_its_gradient() -> None:
    net, x = mlp_block()
    outer = nn.Parameter(torch.randn(D, dtype=torch.float64))
    net.module = Of(lambda self, x, z: z * outer).double()
    of_tiles, found = Tiles(TILE), []
    for run in (lambda _, call: call(), of_tiles.run):
        outer.grad = None
        run(net, lambda: net(x)).square().sum().backward()
        assert outer.grad is not None
        found.append({"outer": outer.grad})
    assert_exact(found[1], found[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_in_the_call(dtype: torch.dtype, tried: dict[str, bool]) -> None:
    make, batch, loss_fn, _ = NETWORKS["llama"]
    torch.manual_seed(0)
    net = make()
    x, y = batch(LONG)
    truth = undivided(copy.deepcopy(net).double(), loss_fn, x, y)

    def whole(model: nn.Module) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype):
            loss = loss_fn(model(x), y)
        loss.backward()
        return state_of(model, loss)

    noise = error_of(whole(copy.deepcopy(net)), truth)
    engine = Engine(net, loss_fn, plan=plan_of(3))
    for _ in range(2):
        net.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = engine.backward(x, y)
        got = state_of(net, loss)
        assert max(error_of(got, truth).values()) < 1.5 * max(noise.values())
    assert tried["SwiGLU"]


def test_sums_of_half_precision_over_many_tiles_are_rounded_once() -> None:
    torch.manual_seed(0)
    net = Block(MLP()).bfloat16()
    x = torch.randn(1, 4096, D).bfloat16()
    want, got = compared(net, x, tile=8, times=1)
    truth, _ = compared(copy.deepcopy(net).double(), x.double(), times=1)
    name = "module.down.weight.grad"
    noise = error_of({name: want[name]}, {name: truth[name]})
    assert error_of({name: got[name]}, {name: truth[name]})[name] < 2 * noise[name]


def test_tiles_and_chunks_of_a_head_together(tried: dict[str, bool]) -> None:
    make, batch, loss_fn, _ = NETWORKS["llama"]
    torch.manual_seed(0)
    net = make().double()
    x, y = batch(LONG)
    engine = Engine(net, loss_fn, plan=plan_of(1, chunked=16 * 90 * 8))
    for _ in range(2):
        net.zero_grad()
        want = undivided(net, loss_fn, x, y)
        assert_exact(state_of(net, engine.backward(x, y)), want)
    assert tried["SwiGLU"]


class Sums(nn.Module):
    """Of each token and those before it: a layer that is in no tile."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / x.shape[1]


def test_inputs_of_tiles_may_be_offloaded() -> None:
    torch.manual_seed(0)
    mlps = [nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(4)]
    net = nn.Sequential(*(layer for mlp in mlps for layer in (Sums(), mlp)))
    x = torch.randn(4, 1024, 32)
    off, of_tiles = anybatch.offload(memory="3500KiB", device="cpu"), Tiles(32)
    want = undivided(net, lambda z: z.square().mean(), x, None)
    for _ in range(3):
        net.zero_grad()
        with off:
            loss = of_tiles.run(net, lambda: net(x)).square().mean()
            loss.backward()
        assert max(error_of(state_of(net, loss), want).values()) < 1e-5
        assert off.last is not None
        assert off.last.out_bytes > 0
    off.close()


def test_a_model_goes_with_its_engine() -> None:
    make, batch, loss_fn, _ = NETWORKS["gpt2"]
    net = make().double()
    engine = Engine(net, loss_fn, plan=plan_of())
    engine.backward(*batch(LONG))
    there = [*map(weakref.ref, (*net.modules(), *net.parameters()))]
    del net, engine
    gc.collect()
    assert not [one for one in there if one() is not None]


def test_a_second_derivative_is_refused_by_name() -> None:
    net, x = mlp_block()
    x.requires_grad_()
    loss = Tiles(TILE).run(net, lambda: net(x)).square().sum()
    with pytest.raises(anybatch.errors.NotYetError, match="no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_compiled_module_is_left_whole(tried: dict[str, bool]) -> None:
    net, x = mlp_block()
    net.module.compile(backend="eager")
    Tiles(TILE).run(net, lambda: net.after(x))
    assert "MLP" not in tried
    assert not any("forward" in module.__dict__ for module in net.module.modules())


@contextmanager
def failing(call: int, error: type[BaseException]) -> Iterator[list[int]]:
    """Raise an error when so many tiles have been computed, forward or backward."""
    own, count = tiles._Tile.compute, [0]

    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        found = own(self, *args, **kwargs)
        if count[0] == call:
            raise error("full")
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles._Tile, "compute", compute)
        yield count


@pytest.mark.parametrize("call", [1, 4, 7, 10, 16, 22, 32])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ArithmeticError])
def test_a_step_that_ends_in_a_tile_leaves_no_trace(call: int, error: type[BaseException]) -> None:
    make, batch, loss_fn, _ = NETWORKS["gpt2"]
    torch.manual_seed(0)
    net = make().double()
    x, y = batch(LONG, 2)
    engine = Engine(net, loss_fn, plan=plan_of())
    engine.backward(x, y)
    before = snapshot(net)
    with failing(call, error), pytest.raises(error):
        engine.backward(x, y)
    assert same(snapshot(net), before)
    assert not any("forward" in module.__dict__ for module in net.modules())
    net.zero_grad()
    want = undivided(net, loss_fn, x, y)
    assert_exact(state_of(net, engine.backward(x, y)), want)


@pytest.mark.parametrize("call", [1, 7, 10, 16, 32])
def test_memory_that_runs_out_in_a_tile_makes_smaller_micro_batches(call: int) -> None:
    make, batch, loss_fn, _ = NETWORKS["gpt2"]
    torch.manual_seed(0)
    net = make().double()
    x, y = batch(LONG, 4)
    engine = Engine(net, loss_fn, plan=plan_of(2))
    engine.backward(x, y)
    net.zero_grad()
    want = undivided(net, loss_fn, x, y)
    with failing(call, torch.OutOfMemoryError) as count:
        assert_exact(state_of(net, engine.backward(x, y)), want)
    assert count[0] > call
    assert engine.plan is not None
    assert engine.plan.micro_batch == 1


COMMON = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**COMMON, "vocab_size": 90, "intermediate_size": 96, "num_key_value_heads": 1}
PATCHES = {**COMMON, "intermediate_size": 96, "image_size": 16, "patch_size": 2}
HUB: dict[str, tuple[dict[str, Any], set[str]]] = {
    "LlamaForCausalLM": (TEXT, {"LlamaMLP"}),
    "MixtralForCausalLM": (
        TEXT | {"num_local_experts": 2, "experts_implementation": "eager"},
        set(),
    ),
    "GPT2LMHeadModel": (
        {"vocab_size": 90, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        {"GPT2MLP"},
    ),
    "ViTForImageClassification": (PATCHES | {"hidden_dropout_prob": 0.0}, {"ViTMLP"}),
}


@pytest.mark.parametrize("name", [*HUB])
def test_models_of_transformers_in_tiles(name: str, tried: dict[str, bool]) -> None:
    hub: Any = pytest.importorskip("transformers", reason="needs transformers")
    options, expected = HUB[name]
    cls = getattr(hub, name)
    torch.manual_seed(0)
    net = cls(cls.config_class(**options))
    ids = torch.randint(90, (3, LONG))
    batch = {"input_ids": ids, "labels": ids}
    if name.startswith("ViT"):
        batch = {"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.tensor([0, 1, 0])}
    double = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}

    def run(model: nn.Module, rows: Any) -> dict[str, Tensor]:
        loss = model(**rows).loss
        loss.backward()
        return state_of(model, loss)

    truth = run(copy.deepcopy(net).double(), double)
    noise = error_of(run(copy.deepcopy(net), batch), truth)
    engine = Engine(net, plan=plan_of(2))
    for _ in range(2):
        net.zero_grad()
        assert_exact(state_of(net, engine.backward(batch)), truth, noise)
    assert {one for one, tiled in tried.items() if tiled} == expected


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_draws_beside_tiles_are_found_again(micro_batch: int, tried: dict[str, bool]) -> None:
    torch.manual_seed(0)
    layers = iter([SwiGLU(), MLP(dropout=0.2)])
    net = Language(lambda: Layer(RMSNorm, Attention(), next(layers))).double()
    engine = Engine(net, of_tokens, plan=plan_of(micro_batch), rng="batch")
    for _ in range(2):
        x, y = words(LONG)
        net.zero_grad()
        start = torch.get_rng_state()
        want = undivided(net, of_tokens, x, y)
        torch.set_rng_state(start)
        assert_exact(state_of(net, engine.backward(x, y)), want)
    assert tried == {**tried, "SwiGLU": True, "MLP": False}
