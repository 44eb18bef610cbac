"""README: a model that ``fully_shard`` has sharded trains on the batch of all ranks.

Real processes on gloo. Loss, gradients and running statistics are those of the undivided batch of
one process in float64, however many micro-batches a rank has; what stays is spread as it was.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.oracle import assert_exact, same, snapshot
from tests.ranks.pool import Pool, ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
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
from anybatch import Engine, NotExactError, NotYetError, RankError
from anybatch.exactness import error_of
from anybatch.gradients import Gradients
from anybatch.ranks.group import Group

N = 22
SHARDS = {2: (13, 9), 4: (7, 0, 3, 12)}


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[int, Pool]]:
    with ranks(request.param) as found:
        yield request.param, found


class Net(nn.Module):
    """Rows over ranks come out uneven and empty; one layer is frozen, two are tied."""

    def __init__(self, norm: str, again: bool = False) -> None:
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


def net(kind: str) -> Net:
    torch.manual_seed(3)
    return Net(KINDS[kind][0], again="dice" in kind).double()


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return torch.randn(N, 5).double(), torch.randint(6, (N,))


def shard_of(rank: int, size: int, *tensors: Tensor) -> list[Tensor]:
    begin = sum(SHARDS[size][:rank])
    return [t[begin : begin + SHARDS[size][rank]] for t in tensors]


def mesh_of(kind: str, size: int) -> DeviceMesh:
    if kind == "copies":
        return init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards"))
    return init_device_mesh("cpu", (size,))


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 4 == 0 else None


def sharded(kind: str, size: int, **options: Any) -> Net:
    """Shard as people do: blocks first, then what is left."""
    model, options = net(kind), {"mesh": mesh_of(kind, size), **options}
    if kind == "columns":
        options["shard_placement_fn"] = columns
    if kind != "root":
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
            whole = p.grad
            if isinstance(p, DTensor):
                assert isinstance(whole, DTensor)
                assert (whole.placements, whole.device_mesh) == (p.placements, p.device_mesh)
                assert whole.to_local().shape == p.to_local().shape
                whole = whole.full_tensor()
            found[f"{name}.grad"] = whole
    return found | {f"{name} (buffer)": b.clone() for name, b in model.named_buffers()}


def on_rank(rank: int, size: int, kind: str, micro_batch: int) -> dict[str, Tensor]:
    model, loss = sharded(kind, size), KINDS[kind][1]
    x, y = shard_of(rank, size, *rows())
    if kind == "root":
        register_fsdp_forward_method(model, "encode")
    engine = Engine(model, loss, micro_batch=micro_batch)
    found = trained(
        model, lambda: engine.backward(x, y), lambda: engine.evaluate(x, y)
    )
    assert isinstance(model, FSDPModule)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return found


def truth(kind: str) -> dict[str, Tensor]:
    model, loss, (x, y) = net(kind), KINDS[kind][1], rows()

    def step() -> Tensor:
        found: Tensor = loss(model(x), y)
        found.backward()  # type: ignore[no-untyped-call]
        return found.detach()

    def evaluate() -> Tensor:
        with torch.no_grad():
            found: Tensor = loss(model(x), y)
        return found

    return trained(model, step, evaluate)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_all_ranks(pool: tuple[int, Pool], kind: str) -> None:
    _, workers = pool
    want = truth(kind)
    for got in workers.run(on_rank, kind, 3):
        assert got.keys() == want.keys()
        assert_exact(got, want)
