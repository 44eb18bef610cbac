"""README: hooks on parameters fire once a step, on the gradient of the full batch.

The truth is torch alone, on the undivided batch in float64, with the same hooks. What they were
given is compared as well as what they have made: each logs it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, same, snapshot, state_of
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import anybatch
from anybatch import Engine, LazyBatch
from anybatch.errors import NotExactError
from anybatch.execution.gradients import Gradients

BATCH = 10
SIZES = [(1, False), (3, True), (4, False), (10, True)]
"""Micro-batches of one, with a tail of one, uneven, and the full batch; gradients before them."""

Log = list[Tensor]
KINDS = "_backward_hooks", "_post_accumulate_grad_hooks"


class Net(nn.Module):
    """A layer that is used twice, a parameter that is not used, and no gradient that is noise."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 6, bias=False), norm, nn.Linear(6, 3)
        self.again = nn.Linear(6, 6)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.last(self.again(self.again(x).tanh()))


# --------------------------------------------------------------------------------- the hooks


def on_each(make: Callable[..., Any], *, post: bool = False) -> Callable[[Net, Log], None]:
    """Register a hook, made of the log, on every parameter."""

    def install(model: Net, log: Log) -> None:
        for p in model.parameters():
            hook = make(log)
            p.register_post_accumulate_grad_hook(hook) if post else p.register_hook(hook)

    return install


def logged(change: Callable[[Tensor], Any]) -> Callable[[Log], Any]:
    def make(log: Log) -> Callable[[Tensor], Any]:
        def hook(gradient: Tensor) -> Any:
            log.append(gradient.detach().clone())
            return change(gradient)

        return hook

    return make


def logged_post(change: Callable[[Tensor], None]) -> Callable[[Log], Any]:
    def make(log: Log) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            log.append(parameter.grad.clone())
            change(parameter)

        return hook

    return make


def clamp_(parameter: Any) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


def sign(parameter: Any) -> None:
    parameter.grad = parameter.grad.sign() * 0.5


def consumed(parameter: Any) -> None:
    parameter.grad = None


def several(model: Net, log: Log) -> None:
    """Order matters: what one returns is what the next one gets, and None changes nothing."""
    for p in model.parameters():
        p.register_hook(logged(lambda g: g + 0.02)(log))
        p.register_hook(logged(lambda _: None)(log))
        p.register_hook(logged(lambda g: g.clamp(-0.01, 0.03))(log))
        p.register_post_accumulate_grad_hook(logged_post(lambda p: p.grad.mul_(2))(log))
        p.register_post_accumulate_grad_hook(logged_post(sign)(log))


def all_norms(model: Net, log: Log) -> None:
    """The last hook to come clips all gradients by their norm, as they are by then."""
    every = list(model.parameters())

    def clip(_: Tensor) -> None:
        there = [p for p in every if p.grad is not None]
        log.append(nn.utils.clip_grad_norm_(there, 0.05))

    model.first.weight.register_post_accumulate_grad_hook(clip)


def at_once(model: Net, log: Log) -> None:
    """One hook for the gradients of several tensors of one backward."""

    def hook(gradients: Any) -> None:
        log.append(torch.cat([g.flatten() for g in gradients if g is not None]))

    register_multi_grad_hook([model.first.weight, model.unused, model.last.weight], hook)
    register_multi_grad_hook([model.again.weight, model.last.bias], log.append, mode="any")


def removed(model: Net, log: Log) -> None:
    """A hook that fires in its first step only, and takes the next one with it."""
    for p in model.parameters():
        handles: list[Any] = []

        def hook(gradient: Tensor, handles: Any = handles) -> Tensor:
            log.append(gradient.clone())
            for handle in handles:
                handle.remove()
            return gradient.sign()

        handles += [p.register_hook(hook), p.register_hook(logged(lambda g: g * 3)(log))]
        p.register_hook(logged(lambda g: g + 1)(log))


def one_by_one(model: Net, log: Log) -> None:
    """What hooks share moves from one to the next: which comes first is told by the graph."""
    state = {"scale": 1.0}

    def hook(gradient: Tensor) -> Tensor:
        state["scale"] *= 0.5
        log.append(gradient.clone())
        return gradient * state["scale"]

    for p in model.parameters():
        p.register_hook(hook)


def noise(model: Net, log: Log) -> None:
    for p in model.parameters():
        p.register_hook(logged(lambda g: g + torch.randn_like(g))(log))


HOOKS: dict[str, Callable[[Net, Log], None]] = {
    "clamp": on_each(logged(lambda g: g.clamp(-0.01, 0.01))),
    "clip": on_each(logged(lambda g: g / g.norm())),
    "mask": on_each(logged(lambda g: g * (g > 0))),
    "log": on_each(logged(lambda _: None)),
    "in place": on_each(logged(lambda g: g.abs_())),
    "post clamp": on_each(logged_post(clamp_), post=True),
    "post sign": on_each(logged_post(sign), post=True),
    "post consumed": on_each(logged_post(consumed), post=True),
    "several": several,
    "all norms": all_norms,
    "at once": at_once,
    "removed": removed,
    "in turn": one_by_one,
}


# ---------------------------------------------------------------------------- the mechanisms


def coupled(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out / (1 + out.square().mean(0)), y)


def counted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, ignore_index=0)


MECHANISMS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "streaming": (nn.Identity, counted),
    "accumulator": (nn.Identity, F.cross_entropy),
    "lazy": (nn.Identity, counted),
    "two passes": (nn.Identity, coupled),
    "lanes": (partial(nn.BatchNorm1d, 6), F.cross_entropy),
    "lanes, coupled": (partial(nn.BatchNorm1d, 6), coupled),
}


def made(mechanism: str, hooks: str, *, before: bool) -> tuple[Net, Any, Log]:
    torch.manual_seed(3)
    norm, loss = MECHANISMS[mechanism]
    model, log = Net(norm()).double(), Log()
    if before:
        for p in [*model.parameters()][1:]:
            p.grad = torch.randn_like(p) / 50
    HOOKS[hooks](model, log)
    return model, loss, log


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return torch.randn(BATCH, 5).double(), torch.arange(BATCH) % 3


def registered(model: nn.Module) -> list[Any]:
    """Return which objects hold the hooks of all parameters, and what is in them, in order."""
    found = [getattr(p, attribute) for p in model.parameters() for attribute in KINDS]
    return [(id(one), None if one is None else [*one.items()]) for one in found]


def found(model: nn.Module, loss: Tensor, log: Log) -> dict[str, Tensor]:
    return state_of(model, loss) | {f"log {at}": entry for at, entry in enumerate(log)}


def by_torch(model: Net, loss: Any, log: Log, steps: int = 1) -> dict[str, Tensor]:
    x, y = rows()
    for _ in range(steps):
        value = loss(model(x), y)
        value.backward()
    return found(model, value, log)


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize(("size", "before"), SIZES)
@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("hooks", HOOKS)
def test_hooks_fire_once_on_the_gradient_of_the_full_batch(
    hooks: str, mechanism: str, size: int, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps without zero_grad between them: the second finds the gradients of the first."""
    want = by_torch(*made(mechanism, hooks, before=before), steps=2)
    model, loss, log = made(mechanism, hooks, before=before)
    (x, y), holders = rows(), registered(model)
    if mechanism == "accumulator":
        divide = Gradients.divide
        monkeypatch.setattr(
            Gradients, "divide", lambda self, accumulator: divide(self, accumulator=not accumulator)
        )
    engine = Engine(model, loss, micro_batch=size)
    for _ in range(2):
        lazy = mechanism == "lazy"
        batch = (LazyBatch(TensorDataset(x, y)),) if lazy else (x, y)
        gradients = [p.grad for p in model.parameters()]
        value = engine.backward(*batch)
        if hooks == "log":
            same_gradients = [
                p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)
            ]
            assert all(same or g is None for same, g in zip(same_gradients, gradients, strict=True))
    assert_exact(found(model, value, log), want)
    assert [one for one, _ in registered(model)] == [one for one, _ in holders]
    if hooks != "removed":
        assert registered(model) == holders


# ------------------------------------------------------------------------------- other tensors


def clip(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


def both(run: Callable[[Any], dict[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what a step of the engine in micro-batches of 4 gives, and what torch alone gives."""

    def by_engine(model: nn.Module, loss: Any, x: Any, y: Any) -> Tensor:
        return Engine(model, loss, micro_batch=4).backward(x, y)

    def plain_step(model: nn.Module, loss: Any, x: Any, y: Any) -> Tensor:
        value: Tensor = loss(model(x), y)
        value.backward()
        return value

    return run(by_engine), run(plain_step)


def test_a_parameter_that_only_the_loss_has() -> None:
    def run(step: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, scale = nn.Linear(5, 3).double(), nn.Parameter(torch.tensor(1.5).double())
        scale.register_hook(clip)
        x, y = rows()
        for _ in range(2):
            value = step(model, lambda out, y: F.cross_entropy(out * scale, y), x, y)
        assert scale.grad is not None
        return state_of(model, value) | {"scale": scale.grad}

    assert_exact(*both(run))


def test_rows_that_have_a_gradient() -> None:
    def run(step: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, (x, y) = nn.Linear(5, 3).double(), rows()
        x.requires_grad_().register_hook(clip)
        value = step(model, F.cross_entropy, x, y)
        assert x.grad is not None
        return state_of(model, value) | {"x": x.grad}

    assert_exact(*both(run))


def test_sparse_gradients() -> None:
    def run(step: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        table = nn.EmbeddingBag(5, 3, sparse=True).double()
        table.weight.register_hook(lambda g: g.coalesce() * (1 / torch.sparse.sum(g * g).sqrt()))
        table.weight.register_post_accumulate_grad_hook(logged_post(lambda p: p.grad.mul_(3))([]))
        x, y = torch.arange(20).view(10, 2) % 5, torch.arange(10) % 3
        for _ in range(2):
            value = step(table, F.cross_entropy, x, y)
        return {name: t.to_dense() for name, t in state_of(table, value).items()}

    assert_exact(*both(run))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("before", [False, True])
def test_hooks_on_half_precision_get_the_sum_rounded_once(before: bool, dtype: Any) -> None:
    """The sum is exact in float32, so its cast is that of the undivided batch."""
    model, (x, y) = nn.Linear(5, 1, bias=False).bfloat16(), rows()
    weight = model.weight
    if dtype == torch.float32:
        weight.grad_dtype = dtype
    if before:
        weight.grad = torch.full_like(weight, 1.5, dtype=dtype)
    log: Log = []
    weight.register_hook(logged(lambda g: g.sign() * 0.25)(log))
    weight.register_post_accumulate_grad_hook(logged_post(lambda p: None)(log))
    x, y = x[:8].sign().bfloat16(), y[:8]
    loss = anybatch.Loss.per_sample(lambda out, _: out.float().flatten())
    Engine(model, loss, micro_batch=3).backward(x, y)
    want = x.double().mean(0, keepdim=True)
    assert torch.equal(log[0], want.to(dtype))
    assert torch.equal(log[1], (want.sign() * 0.25 + 1.5 * before).to(dtype))
    assert torch.equal(weight.grad, log[1])


def test_hooks_get_gradients_that_a_scaler_has_scaled() -> None:
    model, (x, y), log = nn.Linear(5, 3).double(), rows(), Log()
    twin = copy.deepcopy(model)
    model.weight.register_hook(logged(lambda g: g.clamp(-1, 1))(log))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    Engine(model, F.cross_entropy, micro_batch=4).backward(x, y, scaler=scaler)
    (64 * F.cross_entropy(twin(x), y)).backward()
    want = {"log": twin.weight.grad, "grad": twin.weight.grad.clamp(-1, 1)}
    assert_exact({"log": log[0], "grad": model.weight.grad}, want)


@pytest.mark.parametrize("size", [3, 10])
def test_noise_of_a_hook_is_that_of_the_full_batch(size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    twin, (x, y) = copy.deepcopy(model), rows()
    for one in (model, twin):
        noise(one, [])
    torch.manual_seed(5)
    value = F.cross_entropy(twin(x), y)
    value.backward()
    rng_state = torch.get_rng_state()
    torch.manual_seed(5)
    got = state_of(
        model, Engine(model, F.cross_entropy, micro_batch=size, rng="batch").backward(x, y)
    )
    assert_exact(got, state_of(twin, value))
    assert torch.equal(torch.get_rng_state(), rng_state)


@pytest.mark.parametrize("gives_up", [False, True])
def test_planning_fires_no_hook(gives_up: bool) -> None:
    """Probes run real backwards; the hooks are there again after a plan, and after none."""
    torch.manual_seed(0)
    model, (x, y), log = nn.Linear(5, 3).double(), rows(), Log()
    HOOKS["several"](model, log)  # type: ignore[arg-type]
    holders = registered(model)
    memory = 100 if gives_up else "64MiB"
    engine = Engine(model, F.cross_entropy, memory=memory)
    if gives_up:
        with pytest.raises(anybatch.errors.BudgetError):
            engine.foresee(x, y)
    else:
        engine.foresee(x, y)
    assert registered(model) == holders
    assert not log
    if not gives_up:
        engine.backward(x, y)
        assert len(log) == 5 * 2


# ------------------------------------------------------------------------- failures and retries


class Short(torch.autograd.Function):
    """The identity; backward runs out of memory for more than two rows, when asked to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if len(gradient) > 2:
            raise torch.OutOfMemoryError("full")
        return gradient


class Runs(nn.Module):
    """Runs out of memory in backward, behind the gradients of its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Short.apply(self.first(x)))


@pytest.mark.product
@pytest.mark.parametrize("in_accumulator", [False, True])
@pytest.mark.parametrize("loss", [F.cross_entropy, coupled])
@pytest.mark.parametrize("size", [4, 10])
def test_hooks_fire_once_though_memory_runs_out(
    size: int, loss: Any, in_accumulator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, (x, y), log = Runs().double(), rows(), Log()
    twin = copy.deepcopy(model)
    HOOKS["clip"](model, log)  # type: ignore[arg-type]
    HOOKS["clip"](twin, [])  # type: ignore[arg-type]
    monkeypatch.setattr(Short, "backward", staticmethod(lambda _, g: g))
    value = loss(twin(x), y)
    value.backward()
    monkeypatch.undo()
    if in_accumulator:
        divide = Gradients.divide
        monkeypatch.setattr(
            Gradients, "divide", lambda self, accumulator: divide(self, accumulator=True)
        )
    engine = Engine(model, loss, micro_batch=size)
    assert_exact(state_of(model, engine.backward(x, y)), state_of(twin, value))
    assert engine.last is not None
    assert engine.last.retries
    assert len(log) == 4


class BoomError(Exception):
    pass


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize(("place", "post"), [(0, True), (3, False)])
@pytest.mark.parametrize(
    "error", [BoomError("x"), KeyboardInterrupt("x"), torch.OutOfMemoryError("x")]
)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_hook_that_raises_leaves_no_trace_and_is_not_fired_again(
    mechanism: str, error: BaseException, place: int, post: bool
) -> None:
    model, loss, log = made(mechanism, "removed", before=True)
    every = [model.last.bias, model.last.weight, model.again.bias, model.again.weight]

    def fails(_: Tensor) -> None:
        log.append(torch.zeros(()))
        raise error

    p = every[place]
    p.register_post_accumulate_grad_hook(fails) if post else p.register_hook(fails)
    (x, y), before, holders = rows(), snapshot(model), registered(model)
    engine = Engine(model, loss, micro_batch=4)
    with pytest.raises(type(error), match="x"):
        engine.backward(x, y)
    assert same(before, snapshot(model))
    assert registered(model) == holders
    assert [entry.dim() for entry in log].count(0) == 1
    assert len(log) == 3 * (place + 1) + 1


def test_an_optimizer_in_a_hook_is_refused_when_the_hooks_fire() -> None:
    model, loss, _ = made("streaming", "several", before=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.first.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    (x, y), before, holders = rows(), snapshot(model), registered(model)
    with pytest.raises(NotExactError, match=r"SGD.step\(\) was called inside"):
        Engine(model, loss, micro_batch=4).backward(x, y)
    assert same(before, snapshot(model))
    assert registered(model) == holders


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
@pytest.mark.parametrize(("size", "also"), [(4, False), (4, True), (10, True)])
def test_a_hook_on_the_node_of_a_gradient_is_refused(register: str, size: int, also: bool) -> None:
    """Undivided it fires once, unless the parameter has a hook of its own, too."""
    model, (x, y) = nn.Linear(5, 3).double(), rows()
    node: Any = model.weight.expand_as(model.weight).grad_fn
    node = node.next_functions[0][0]
    getattr(node, register)(lambda *_: None)
    if also:
        model.weight.register_hook(clip)
    before = snapshot(model)
    with pytest.raises(NotExactError, match=r"on the AccumulateGrad node .*shape \(3, 5\)"):
        Engine(model, F.cross_entropy, micro_batch=size).backward(x, y)
    assert same(before, snapshot(model))


class Registers(nn.Module):
    """Registers a hook in forward, with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.layer.weight.register_hook(clip)
        return self.layer(x)


@pytest.mark.parametrize(("size", "also"), [(4, False), (4, True), (10, True)])
def test_a_hook_that_forward_registers_is_refused(size: int, also: bool) -> None:
    model, (x, y) = Registers().double(), rows()
    if also:
        model.layer.weight.register_hook(clip)
    holders = registered(model)
    with pytest.raises(NotExactError, match=r"registered before a step.*shape \(3, 5\)"):
        Engine(model, F.cross_entropy, micro_batch=size).backward(x, y)
    if also:
        assert registered(model) == holders


# ---------------------------------------------------------------------------------- the check


@pytest.mark.parametrize("hooks", ["clamp", "post sign", "several", "in turn"])
def test_a_check_has_hooks_of_its_own(hooks: str) -> None:
    model, loss, log = made("streaming", hooks, before=False)
    holders, (x, y) = registered(model), rows()
    assert anybatch.check(model, loss, (x, y)).exact
    assert not log
    assert registered(model) == holders


def test_a_check_runs_with_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what suspends them they would be there during the step, and that is refused."""
    model, loss, _ = made("streaming", "clamp", before=False)
    monkeypatch.setattr("anybatch.core.transaction.Before.suspend_hooks", lambda self: None)
    with pytest.raises(NotExactError, match="hooks on parameters must be registered before"):
        anybatch.check(model, loss, rows())


def test_a_check_refuses_hooks_that_it_cannot_copy() -> None:
    model, (x, y) = nn.Linear(5, 3).double(), rows()
    lines = (line for line in ["a", "b"])
    model.bias.register_hook(lambda g: next(lines) and None)
    with pytest.raises(
        anybatch.errors.AnybatchError, match=r"copy of the hooks .* one on bias cannot"
    ):
        anybatch.check(model, F.cross_entropy, (x, y))


# ------------------------------------------------------------------------------ several ranks


SHARDS = (6, 4, 0)


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with ranks(len(SHARDS)) as found:
        yield found


def on_rank(rank: int, mechanism: str, hooks: str) -> tuple[Net, Engine, Any, Any, Log]:
    model, loss, log = made(mechanism, hooks, before=True)
    begin = sum(SHARDS[:rank])
    x, y = (one[begin : begin + SHARDS[rank]] for one in rows())
    return model, Engine(model, loss, micro_batch=4), x, y, log


def two_steps(rank: int, _size: int, mechanism: str, hooks: str) -> dict[str, Tensor]:
    model, engine, x, y, log = on_rank(rank, mechanism, hooks)
    engine.backward(x, y)
    return found(model, engine.backward(x, y), log)


@pytest.mark.product
@pytest.mark.parametrize("mechanism", ["streaming", "two passes", "lanes"])
@pytest.mark.parametrize("hooks", ["clip", "post sign", "several", "at once"])
def test_hooks_get_the_gradient_of_all_ranks_on_each(
    workers: Pool, hooks: str, mechanism: str
) -> None:
    """On a rank without samples, too; none is sent before backward has ended."""
    want = by_torch(*made(mechanism, hooks, before=True), steps=2)
    every = workers.run(two_steps, mechanism, hooks)
    for got in every:
        logs = [got.pop(name) for name in list(got) if name.startswith("log")]
        assert len(logs) == sum(name.startswith("log") for name in want)
        assert_exact(got, {name: t for name, t in want.items() if not name.startswith("log")})
        assert same(
            {n: t for n, t in got.items() if n != "loss"},
            {n: every[0][n] for n in got if n != "loss"},
        )


def refused(rank: int, _size: int, what: str) -> Any:
    hooks = "clip" if what == "one rank" and rank == 1 else "log"
    model, engine, x, y, _ = on_rank(rank, "streaming", hooks)
    if what == "one rank" and rank == 1:
        model.last.weight.register_hook(clip)
    if what == "draws":
        noise(model, [])
    if what == "fails" and rank == 1:
        model.last.weight._backward_hooks.popitem()
        model.last.weight.register_hook(_raises)
    before, holders, said = snapshot(model), registered(model), ""
    try:
        engine.backward(x, y)
    except anybatch.errors.AnybatchError as error:
        said = f"{type(error).__name__}: {error}"
    except BoomError as error:
        said = f"BoomError: {error}"
    return said, same(before, snapshot(model)), registered(model) == holders


def _raises(_: Tensor) -> None:
    raise BoomError("in a hook")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("one rank", "RankError: all ranks must have hooks on the same parameters.*rank 1 does"),
        ("draws", "NotExactError: a hook on a parameter must compute the same on all ranks"),
        ("fails", "BoomError: in a hook"),
    ],
)
def test_hooks_that_ranks_do_not_have_alike_are_refused(
    workers: Pool, what: str, words: str
) -> None:
    for said, nothing_moved, hooks_are_there in workers.run(refused, what):
        assert re.search(words, said)
        assert nothing_moved
        assert hooks_are_there


# ------------------------------------------------------------------------- parameters that leave


def test_hooks_on_parameters_that_are_offloaded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 3)).double()
    twin, x, y = copy.deepcopy(model), torch.randn(BATCH, 64).double(), rows()[1]
    for one in (model, twin):
        for p in one.parameters():
            p.register_hook(clip)
            p.register_post_accumulate_grad_hook(clamp_ if p.dim() > 1 else sign)
    value = F.cross_entropy(twin(x), y)
    value.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    holders = registered(model)
    with anybatch.offload_states(optimizer, model=model, memory="256KiB"):
        got = Engine(model, F.cross_entropy, micro_batch=4).backward(x, y)
    assert_exact(state_of(model, got), state_of(twin, value))
    assert [entries for _, entries in registered(model)] == [entries for _, entries in holders]
