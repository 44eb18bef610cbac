"""README: a model that ``fully_shard`` has sharded trains on the batch of all ranks.

Real processes on gloo. Loss, gradients and running statistics are those of the undivided batch of
one process in float64, however many micro-batches a rank has; what stays is spread as it was.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.faults import backward_without_data
from tests.oracle import assert_exact, error_of, same
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch import Engine
from anybatch.devices import Group
from anybatch.distributed.fsdp import Sharded, refuse_unknown
from anybatch.errors import NotYetError, RankError
from anybatch.execution.gradients import Gradients

N = 22
SHARDS = {2: (13, 9), 4: (7, 0, 3, 12)}


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, Pool]]:
    with ranks(request.param) as found:
        yield request.param, found


@pytest.fixture
def single_process() -> Iterator[None]:
    """Make a process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Net(nn.Module):
    """Rows over ranks come out uneven and empty; one layer is frozen, two are tied."""

    def __init__(self, norm: str, *, again: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.norm: nn.Module = nn.BatchNorm1d(6) if norm == "batch" else nn.LayerNorm(6)
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.block = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head, self.unused = nn.Linear(6, 6, bias=False), nn.Linear(2, 2)
        self.head.weight = self.stem_out = nn.Parameter(torch.randn(6, 6))
        self.again = again

    def encode(self, x: Tensor) -> Tensor:
        """[n, 5] -> [n, 6]."""
        out: Tensor = self.norm(self.stem(x)) @ self.stem_out
        return out

    def forward(self, x: Tensor) -> Tensor:
        """[n, 5] -> [n, 6]."""
        x = self.encode(x)
        x = self.rnn(x.unsqueeze(1))[0].squeeze(1)
        x = checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)
        out: Tensor = self.head(self.frozen(x))
        return out


def dice(out: Tensor, y: Tensor) -> Tensor:
    found = (out.softmax(1) * F.one_hot(y, 6)).sum(0)
    return 1 - (2 * found / (out.softmax(1).sum(0) + 6)).mean()


KINDS: dict[str, tuple[str, Any]] = {
    "blocks": ("layer", F.cross_entropy),
    "root": ("layer", F.cross_entropy),
    "dice": ("layer", dice),
    "batchnorm": ("batch", F.cross_entropy),
    "batchnorm dice": ("batch", dice),
    "columns": ("layer", F.cross_entropy),
    "copies": ("batch", F.cross_entropy),
}


def net(variant: str) -> Net:
    torch.manual_seed(3)
    return Net(KINDS[variant][0], again="dice" in variant).double()


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return torch.randn(N, 5).double(), torch.randint(6, (N,))


def shard_of(rank: int, size: int, *tensors: Tensor) -> list[Tensor]:
    begin = sum(SHARDS[size][:rank])
    return [t[begin : begin + SHARDS[size][rank]] for t in tensors]


def mesh_of(variant: str, size: int) -> DeviceMesh:
    if variant == "copies":
        return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards"))
    return init_device_mesh("cpu", (size,))


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 4 == 0 else None


def sharded(variant: str, size: int, **options: Any) -> Net:
    """Shard as people do: blocks first, then what is left."""
    model, options = net(variant), {"mesh": mesh_of(variant, size), **options}
    if variant == "columns":
        options["shard_placement_fn"] = columns
    if variant != "root":
        fully_shard(model.block[0], **options)
        fully_shard(model.block, **options)
        fully_shard([model.norm, model.frozen], **options)
    fully_shard(model, **options)
    return model


def trained(
    model: nn.Module, step: Callable[[], Tensor], evaluate: Callable[[], Tensor]
) -> dict[str, Tensor]:
    """Take two steps; the second adds to the gradient of the first. Return loss and all."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    step()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    found = {"loss": step(), "evaluated": evaluate()}
    for name, p in model.named_parameters():
        if p.grad is not None:
            full = p.grad
            if isinstance(p, DTensor):
                assert isinstance(full, DTensor)
                assert (full.placements, full.device_mesh) == (p.placements, p.device_mesh)
                assert full.to_local().shape == p.to_local().shape
                full = full.full_tensor()
            found[f"{name}.grad"] = full
    return found | {f"{name} (buffer)": b.clone() for name, b in model.named_buffers()}


def on_rank(rank: int, size: int, variant: str, micro_batch: int) -> dict[str, Tensor]:
    model, loss = sharded(variant, size), KINDS[variant][1]
    x, y = shard_of(rank, size, *rows())
    if variant == "root":
        register_fsdp_forward_method(model, "encode")
    norms: Any = (
        "adaptive" if variant == "root" else "exact"
    )  # asks for sizes, and has no BatchNorm
    engine = Engine(model, loss, micro_batch=micro_batch, batchnorm=norms)
    found = trained(model, lambda: engine.backward(x, y), lambda: engine.evaluate(x, y))
    assert isinstance(model, FSDPModule)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return found


def truth(variant: str) -> dict[str, Tensor]:
    model, loss, (x, y) = net(variant), KINDS[variant][1], rows()

    def step() -> Tensor:
        found: Tensor = loss(model(x), y)
        found.backward()  # type: ignore[no-untyped-call]
        return found.detach()

    def evaluate() -> Tensor:
        with torch.no_grad():
            found: Tensor = loss(model(x), y)
        return found

    return trained(model, step, evaluate)


@pytest.mark.large(few=4)
@pytest.mark.parametrize("variant", KINDS)
def test_gradients_are_those_of_all_ranks(pool: tuple[int, Pool], variant: str) -> None:
    _, workers = pool
    want = truth(variant)
    for got in workers.run(on_rank, variant, 3):
        assert got.keys() == want.keys()
        assert_exact(got, want)


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("variant", ["blocks", "batchnorm dice"])
def test_one_rank_is_a_batch_of_its_own(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    monkeypatch.setitem(SHARDS, 1, (N,))
    assert_exact(on_rank(0, 1, variant, 3), truth(variant))


def state(model: nn.Module) -> dict[str, Any]:
    """Return what a failed step must leave as it was, as far as it is on this rank."""
    grads = [p.grad for p in model.parameters()]
    return {
        "parameters": [p.to_local().clone() for p in model.parameters()],
        "parameter ids": [id(p) for p in model.parameters()],
        "gradients": [None if g is None else g.to_local().clone() for g in grads],
        "gradient ids": [id(g) for g in grads],
        "buffers": [b.clone() for b in model.buffers()],
        "rng": torch.get_rng_state(),
        "classes": [type(m).__name__ for m in model.modules()],
        "attributes": [[*vars(m)] for m in model.modules()],
        "hooks": [[*m._forward_pre_hooks, *m._forward_hooks] for m in model.modules()],
    }


def fails_at(at: int, error: BaseException) -> Callable[..., None]:
    calls = count(1)  # a list would be put back after a look

    def hook(*_: Any) -> None:
        if not backward_without_data() and next(calls) == at:
            raise error

    return hook


def failing(rank: int, size: int, variant: str, place: str, learned: bool) -> Any:
    """Fail on the last rank; return what was said, and the gradients of the step after it."""
    model, (x, y) = sharded(variant, size), shard_of(rank, size, *rows())
    engine = Engine(model, KINDS[variant][1], micro_batch=3)
    if learned:
        engine.backward(x, y)
    before, error = state(model), ValueError("a fault")
    handle: Any = None
    real = Gradients._prepare
    if rank == size - 1:
        hook = fails_at(2 + (place == "forward" and not learned), error)  # past the look at it
        if place == "forward":
            handle = model.block.register_forward_hook(hook)
        elif place == "backward":
            handle = model.block.register_full_backward_hook(hook)
        else:
            Gradients._prepare = fails_at(1, error)  # type: ignore[method-assign]
    before["hooks"] = state(model)["hooks"]
    said = ""
    try:
        engine.backward(x, y)
    except Exception as caught:
        said = f"{type(caught).__name__}: {caught}"
    finally:
        Gradients._prepare = real  # type: ignore[method-assign]
    after = state(model)
    wrong = [what for what in before if not same(before[what], after[what])]
    if handle is not None:
        handle.remove()
    model.zero_grad()
    engine.backward(x, y)
    return said, wrong, full_gradients(model)


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    every = [(name, p.grad) for name, p in model.named_parameters()]
    return {name: g.full_tensor() for name, g in every if isinstance(g, DTensor)}


def well(rank: int, size: int, variant: str) -> dict[str, Tensor]:
    model, (x, y) = sharded(variant, size), shard_of(rank, size, *rows())
    Engine(model, KINDS[variant][1], micro_batch=3).backward(x, y)
    return full_gradients(model)


@pytest.mark.product
@pytest.mark.parametrize(
    ("place", "learned"), [("forward", False), ("backward", True), ("sum", False)]
)
@pytest.mark.parametrize("variant", ["dice", "batchnorm"])
def test_a_step_happens_on_all_ranks_or_on_none(
    pool: tuple[int, Pool], variant: str, place: str, learned: bool
) -> None:
    size, workers = pool
    want = workers.run(well, variant)[0]
    for rank, (said, wrong, got) in enumerate(workers.run(failing, variant, place, learned)):
        fault = "ValueError: a fault"
        assert said == fault if rank == size - 1 else f"rank {size - 1}: {fault}" in said, said
        assert not wrong
        assert_exact(got, want)


def lost(rank: int, size: int) -> str:
    """Kill a rank while parameters are gathered; return what the others say."""
    model, (x, y) = sharded("blocks", size), shard_of(rank, size, *rows())
    engine = Engine(model, F.cross_entropy, micro_batch=3)
    if rank == 1:
        Group.start_gather = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
    before = state(model)
    with pytest.raises(RankError) as caught:
        engine.backward(x, y)
    after = state(model)
    assert all(same(before[what], after[what]) for what in before)
    return str(caught.value)


def test_a_rank_that_is_lost_while_parameters_are_gathered_is_named() -> None:
    with ranks(2) as workers:
        said, gone = workers.each(lost)
    assert isinstance(gone, EOFError)
    assert "rank 1 of 2 is gone" in said


def short(rank: int, size: int, variant: str) -> Any:
    """Run out of memory once, on the last rank."""
    model, (x, y) = sharded(variant, size), shard_of(rank, size, *rows())
    if rank == size - 1:
        model.block.register_forward_hook(fails_at(3, RuntimeError("can't allocate memory")))
    engine = Engine(model, KINDS[variant][1], micro_batch=3)
    engine.backward(x, y)
    return engine.last.retries if engine.last else 0, full_gradients(model)


@pytest.mark.product
@pytest.mark.parametrize("variant", ["blocks", "batchnorm"])
def test_memory_that_runs_out_on_one_rank_costs_a_smaller_step(
    pool: tuple[int, Pool], variant: str
) -> None:
    size, workers = pool
    want = workers.run(well, variant)[0]
    for rank, (retries, got) in enumerate(workers.run(short, variant)):
        assert retries or rank < size - 1
        assert_exact(got, want)


WIDE = 64
"""Of a network whose parameters, gradients and optimizer state weigh as much as its samples."""


def within(rank: int, size: int) -> Any:
    """Return the bytes that a step within a budget has held, and foreseen."""
    torch.manual_seed(2)
    middle = nn.BatchNorm1d(WIDE) if size == 4 else nn.LayerNorm(WIDE)
    model = nn.Sequential(nn.Linear(8, WIDE), middle, nn.Tanh(), nn.Linear(WIDE, WIDE))
    for layer in (model[3], model):
        fully_shard(layer, mesh=mesh_of("", size))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(90 + rank, 8), torch.randint(WIDE, (90 + rank,))
    options: Any = {"memory": "220KiB", "micro_batch": 16, "optimizer": optimizer}
    engine = Engine(model, F.cross_entropy, **options)
    engine.backward(x, y)
    optimizer.step()
    plan = anybatch.plan(model, F.cross_entropy, (x, y), **options, timed=False)
    assert plan.memory is not None
    local_bytes = sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())
    full = sum(p.numel() * p.element_size() for p in model.parameters())
    assert engine.plan is not None
    assert engine.plan.memory is not None
    return engine.last, dict(engine.plan.memory.owners), dict(plan.memory.owners), local_bytes, full


def test_full_and_sharded_parameters_are_within_the_budget(pool: tuple[int, Pool]) -> None:
    size, workers = pool
    for last, owners, again, local_bytes, full in workers.run(within):
        assert last.micro_batches > 1
        assert last.peak_bytes <= last.predicted_bytes <= 220 * 1024
        assert owners["parameters"] == again["parameters"] == full
        assert owners["shards"] == 2 * local_bytes  # the parts, and the gradients of them
        assert owners["optimizer"] >= 2 * local_bytes
        assert owners["optimizer"] < 2 * full * 2 / size + 1024


INNER = MixedPrecisionPolicy(param_dtype=torch.float32)
OUTER = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float64)


def in_low_precision(rank: int, size: int, order: list[int] | None) -> dict[str, Tensor]:
    """Run a step in float32, by FSDP alone where there is an order of the rows."""
    model, (x, y) = net("blocks"), rows()
    fully_shard(model.block, mesh=mesh_of("", size), mp_policy=INNER)
    fully_shard(model, mesh=mesh_of("", size), mp_policy=OUTER)
    x, y = x[:20], y[:20]
    if order is not None:
        x, y = x[order], y[order]
    x, y = (t.tensor_split(size)[rank] for t in (x, y))
    if order is None:
        Engine(model, F.cross_entropy, micro_batch=3).backward(x, y)
    else:
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    found = full_gradients(model)
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert all(p.grad is None or p.grad.dtype == torch.float64 for p in model.parameters())
    return found


def test_a_policy_for_precision_is_respected(pool: tuple[int, Pool]) -> None:
    _, workers = pool
    torch.manual_seed(0)
    want = workers.run(in_low_precision, [*range(20)])[0]
    noise = error_of(workers.run(in_low_precision, torch.randperm(20).tolist())[0], want)
    assert max(noise.values()) > torch.finfo(torch.float64).eps * 1000  # it is in float32
    assert_exact(workers.run(in_low_precision, None)[0], want, noise)


def halved(rank: int, size: int) -> None:
    """Sum gradients of bfloat16 in float32: they come out as they went in."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Flatten(0))
    model[0].weight.data.fill_(1.0)
    fully_shard(model, mesh=mesh_of("", size), mp_policy=policy)
    observed = []
    model[1].register_forward_hook(lambda _, __, out: observed.append(out.dtype))
    x = torch.ones(600, 1)  # a sum in bfloat16 stalls at 256
    Engine(model, lambda out: out.sum(), micro_batch=1).backward(x[: 600 - 7 * rank])
    grad = full_gradients(model)["0.weight"]
    assert grad.dtype == torch.float32
    assert float(grad) == sum(600 - 7 * r for r in range(size))
    assert set(observed) == {torch.bfloat16}


def test_half_precision_is_summed_in_float32(pool: tuple[int, Pool]) -> None:
    _, workers = pool
    workers.run(halved)


def mixed(rank: int, size: int) -> None:
    """Take turns with FSDP's own forward and backward, and keep the order of hooks."""
    model, (x, y) = sharded("blocks", size), rows()
    traced: list[str] = []
    model.block.register_forward_pre_hook(lambda *_: traced.append("mine"))
    before = [[*m._forward_pre_hooks, *m._forward_hooks] for m in model.modules()]
    with torch.no_grad():
        model(x)  # leaves the root gathered
    engine = Engine(model, F.cross_entropy, micro_batch=3)
    mine, its = shard_of(rank, size, x, y)
    loss = engine.backward(mine, its)
    got = full_gradients(model) | {"loss": loss}
    assert [[*m._forward_pre_hooks, *m._forward_hooks] for m in model.modules()] == before
    assert traced
    model.zero_grad()
    again = F.cross_entropy(model(x), y)  # all ranks with all rows: the mean over them is the same
    again.backward()  # type: ignore[no-untyped-call]
    assert_exact(got, full_gradients(model) | {"loss": again.detach()})
    assert engine.backward(mine, its).isfinite()


def test_fsdp_works_on_outside_of_the_engine(pool: tuple[int, Pool]) -> None:
    _, workers = pool
    workers.run(mixed)


def refused(rank: int, size: int, what: str) -> str:
    model: nn.Module
    mesh = mesh_of("", size)
    if what == "tensor parallel":
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    elif what == "both":
        two = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("shards", "parallel"))
        model = nn.Linear(4, 4, bias=False)
        weight = distribute_tensor(model.weight.detach(), two["parallel"], [Shard(0)])
        model.weight = nn.Parameter(weight)
        fully_shard(model, mesh=two["shards"])
    elif what == "first":
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    elif what == "some":
        groups = [init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))["b"]]
        model = fully_shard(nn.Linear(4, 4), mesh=groups[0])
    else:
        model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    if what == "hook":
        model.weight.register_hook(lambda g: g)
    if what == "gradient":
        model.weight.grad = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)])
    weight = model.weight
    loss: Any = nn.MSELoss()
    if what == "kept":
        loss = lambda out, y: out.sum() + weight.to_local().sum() + y.sum()  # noqa: E731
    try:
        Engine(model, loss, micro_batch=1).backward(torch.ones(3, 4), torch.ones(3, 4))
    except anybatch.errors.AnybatchError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


REFUSED = {
    "tensor parallel": "NotYetError: .*weight is a DTensor that fully_shard has not made",
    "both": "NotYetError: a parameter must be sharded over one dimension .*weight is .*Shard",
    "first": "NotYetError: .*the model is in FullyShardedDataParallel: use fully_shard",
    "some": r"NotYetError: .*ranks that share the batch, \[0, 1.*and weight is over",
    "hook": "NotExactError: a sharded parameter must have no hooks, and weight has one",
    "gradient": "NotExactError: a gradient must be sharded as its parameter is, and that of weight",
    "kept": "LossError: a loss must read parameters from the model",
}


@pytest.mark.large(few=4)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_gathered_is_refused_by_name(pool: tuple[int, Pool], what: str) -> None:
    _, workers = pool
    for said in workers.run(refused, what):
        assert pytest.RaisesExc(Exception, match=REFUSED[what]).matches(Exception(said)), said


class Elsewhere:
    """A parameter that is on the CPU, of a model on a GPU."""

    placements = (Shard(0),)
    device_mesh = SimpleNamespace(mesh=torch.tensor([0]), device_type="cuda")

    def to_local(self) -> Tensor:
        return torch.zeros(2)


def test_parameters_that_are_offloaded_are_refused() -> None:
    with pytest.raises(NotYetError, match="where the model runs, and head.weight is on the cpu"):
        refuse_unknown("head.weight", Elsewhere(), None)


@pytest.mark.usefixtures("single_process")
def test_a_torch_that_hides_the_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(fully_shard(nn.Linear(2, 2), mesh=mesh_of("", 1)), nn.MSELoss(), micro_batch=1)
    monkeypatch.delattr(FSDPModule, "_get_fsdp_state")
    monkeypatch.setattr(FSDPModule, "reshard", lambda _: None)
    with pytest.raises(
        NotYetError, match="the precision policy of a sharded model must be readable"
    ):
        engine.backward(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.usefixtures("single_process")
def test_an_interrupt_at_the_wrong_instruction_is_mended_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = fully_shard(nn.Linear(2, 2), mesh=mesh_of("", 1))
    engine, before = Engine(model, nn.MSELoss(), micro_batch=1), state(model)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        # The first call is before the step.
        real, calls = Sharded._spread_again, fails_at(2, KeyboardInterrupt())
        patch.setattr(Sharded, "_spread_again", lambda self: (calls(), real(self)))
        engine.backward(torch.ones(2, 2), torch.ones(2, 2))
    assert not isinstance(model, FSDPModule)
    engine.evaluate(torch.ones(2, 2), torch.ones(2, 2))
    after = state(model)
    assert all(same(before[what], after[what]) for what in before if what[:8] != "gradient")
