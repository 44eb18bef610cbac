"""What groups stand for: processes with DistributedDataParallel, each on its rows of a batch."""

from __future__ import annotations

import socket
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import start_processes
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def tiny() -> nn.Sequential:
    """Two BatchNorms, a stride and a large mean, in float64."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3, stride=2)]
    return nn.Sequential(*layers, nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)).double()


def batches(size: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(size, 3, 8, 8, generator=draw, dtype=torch.float64) + 10,
            torch.randint(3, (size,), generator=draw),
        )
        for _ in range(STEPS)
    ]


def trained(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in data:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def rank(number: int, ranks: int, size: int, port: int, folder: Path) -> None:
    """One process: rows `number`, `number + ranks`, ... of every mini-batch."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=ranks
    )
    try:
        mine = [(x[number::ranks], y[number::ranks]) for x, y in batches(size)]
        for keeps in (True, False):  # False: rank 0's buffers are handed to all, torch's default
            found = tiny()
            trained(DistributedDataParallel(found, broadcast_buffers=not keeps), mine)
            torch.save(found.state_dict(), folder / f"{number}-{keeps}.pt")
    finally:
        dist.destroy_process_group()


def in_processes(ranks: int, size: int, folder: Path) -> dict[bool, list[dict[str, Tensor]]]:
    """Return every rank's state, with buffers of its own and with those of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = (ranks, size, port, folder)
    start_processes(rank, args, nprocs=ranks, start_method="forkserver")
    return {
        keeps: [torch.load(folder / f"{number}-{keeps}.pt") for number in range(ranks)]
        for keeps in (True, False)
    }
