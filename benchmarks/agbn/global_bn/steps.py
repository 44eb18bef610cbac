"""One rank of the benchmark: a training step with local and with global BatchNorm, in turn."""

import copy
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.cli.models.resnet import resnet20
from anybatch.core.moments import Moments, merged_in_order
from anybatch.lockstep import sync_batchnorm as norm_ranks

PIXELS, CLASSES, SEED = 32, 10, 0


class Progress:
    """A meeting that sends nothing: what a layer computes, without the wire."""

    def __init__(self, group: Any) -> None:
        self._size = group.size

    def reduce(
        self,
        key: Any,
        part: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        finish: Callable[[Any], Any],
    ) -> Any:
        """Do the sums that would be done with the parts of others, on this one's."""
        del key
        own = part()
        if isinstance(own, Moments):
            rows = [own.packed() for _ in range(self._size)]
            return finish(merged_in_order(rows, add))
        total = torch.stack([own.double()] * self._size).sum(0)
        return finish(total.to(own.dtype))


def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Forward, backward, and the mean of the gradients over ranks, in one piece."""
    model.zero_grad()
    torch.autograd.backward(F.cross_entropy(model(x), y))
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    dist.all_reduce(flat)


def timed(work: Callable[[], None]) -> float:
    """Return the seconds of the slowest rank."""
    dist.barrier()
    begin = perf_counter()
    work()
    seconds = torch.tensor([perf_counter() - begin])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def run(rank: int, size: int, meet: str, batches: tuple[int, ...], rounds: int) -> Any:
    """Time all ways in the same rounds, in an order that turns; return what rank 0 has found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size)
    torch.manual_seed(SEED + rank)
    local = resnet20(num_classes=CLASSES, in_channels=3, norm="batch")
    ways = {"local": local, "global": anybatch.global_batchnorm(copy.deepcopy(local))}
    ways["global, nothing sent"] = ways["global"]
    found = {}
    for batch in batches:
        x, y = torch.randn(batch, 3, PIXELS, PIXELS), torch.randint(CLASSES, (batch,))
        found[str(batch)] = _rounds(ways, x, y, rounds)
    volumes = _volumes(size) if rank >= 0 else None
    dist.destroy_process_group()
    return {"steps": found, "volumes": volumes}


def _rounds(ways: dict[str, nn.Module], x: Tensor, y: Tensor, rounds: int) -> Any:
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for at in range(-2, rounds):
        for name in names if at % 2 else names[::-1]:
            meeting = norm_ranks.GroupMeeting
            if name == "global, nothing sent":
                norm_ranks.GroupMeeting = Progress  # type: ignore[assignment, misc]
            seconds = timed(lambda name=name: step(ways[name], x, y))  # type: ignore[misc]
            norm_ranks.GroupMeeting = meeting  # type: ignore[misc]
            if at >= 0:
                times[name].append(seconds)
    speeds = {
        name: sorted(a / b for a, b in zip(times["local"], found, strict=True))
        for name, found in times.items()
    }
    return {
        name: {
            "seconds": median(times[name]),
            "speed": [found[len(found) // 4], median(found), found[3 * len(found) // 4]],
        }
        for name, found in speeds.items()
    }


LOOPBACK = Path("/proc/net/dev")
REPEAT = 20


def _sent() -> int:
    """Return the bytes that have gone over the loopback device of this machine."""
    (line,) = [one for one in LOOPBACK.read_text().splitlines() if one.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def _volumes(size: int) -> list[dict[str, float]]:
    """Measure what a rank sends in an all-reduce of M bytes, beside 2 M (N - 1) / N."""
    found = []
    for elements in (2**18, 2**20, 2**22):
        tensor = torch.zeros(elements)
        dist.barrier()
        before = _sent()
        for _ in range(REPEAT):
            dist.all_reduce(tensor)
        dist.barrier()
        sent = (_sent() - before) / REPEAT / size
        bytes_ = 4 * elements
        found.append({"bytes": bytes_, "sent": sent, "ring": 2 * bytes_ * (size - 1) / size})
    return found
