"""One rank of the benchmark: the same step with gradients summed after backward and during it."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.distributed import gradients
from anybatch.distributed.global_batch import Ranks
from anybatch.distributed.process_group import Group, group_of
from benchmarks.agbn.overlap.links import LINKS, wire
from benchmarks.mbs.models import ResNet, TransformerLM

SEED, PIXELS, LENGTH, WORDS = 0, 32, 64, 4096
PIECE = 2**20
"""Elements in a piece of gradients, by hand; the engine's own are of the same size."""


@dataclass
class Case:
    """A step: a model, a rank's rows, and how many at once."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor
    micro_batch: int


def resnet(rows: int, micro_batch: int) -> Case:
    """ResNet-18 of width 64 (GroupNorm) on 32 pixels: 42.6 MiB of gradients."""
    x, y = torch.randn(rows, 3, PIXELS, PIXELS), torch.randint(10, (rows,))
    return Case(ResNet(width=64), nn.CrossEntropyLoss(), x, y, micro_batch)


def _of_words(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def transformer(rows: int, micro_batch: int) -> Case:
    """A transformer of width 256 with 6 layers, 64 words a row: 26.1 MiB of gradients."""
    words = torch.randint(WORDS, (2, rows, LENGTH))
    model = TransformerLM(WORDS, 256, 6, 4, LENGTH)
    return Case(model, _of_words, words[0], words[1], micro_batch)


CASES: dict[str, Callable[[], Case]] = {
    "ResNet-18, 64 rows, 16 at a time": lambda: resnet(64, 16),
    "ResNet-18, 8 rows, at once": lambda: resnet(8, 8),
    "transformer, 4 rows, at once": lambda: transformer(4, 4),
}


class ByHand:
    """A loop by hand, whose last backward sends each piece of gradients as it is complete."""

    def __init__(self, case: Case, group: Group) -> None:
        self._case, self._group = case, group
        self._pieces: list[list[nn.Parameter]] = [[]]
        for parameter in reversed(list(case.model.parameters())):
            if sum(p.numel() for p in self._pieces[-1]) + parameter.numel() > PIECE:
                self._pieces.append([])
            self._pieces[-1].append(parameter)
        self._pieces = [piece for piece in self._pieces if piece]
        self._place = {id(p): at for at, piece in enumerate(self._pieces) for p in piece}
        self._missing: list[int] = []
        self._sent: list[tuple[Tensor, Any]] = []
        self._sends = False

    def run(self, when: str) -> None:
        """Run a step; `when` is "nothing sent", "after" or "during"."""
        case, rows = self._case, len(self._case.x)
        self._missing, self._sent = [len(piece) for piece in self._pieces], []
        hooks = []
        for begin in range(0, rows, case.micro_batch):
            if when == "during" and begin + case.micro_batch >= rows:
                hooks = [
                    p.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
                    for p in case.model.parameters()
                ]
            x, y = (t[begin : begin + case.micro_batch] for t in (case.x, case.y))
            loss = case.loss(case.model(x), y) * (len(x) / rows / self._group.size)
            torch.autograd.backward(loss)
        for hook in hooks:
            hook.remove()
        if when != "nothing sent":
            self._finish()

    def _ready(self, parameter: Tensor) -> None:
        self._missing[self._place[id(parameter)]] -= 1
        while len(self._sent) < len(self._pieces) and not self._missing[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        piece = self._pieces[len(self._sent)]
        flat = torch.cat([p.grad.reshape(-1) for p in piece if p.grad is not None])
        self._sent.append((flat, self._group.start_sum(flat)))

    def _finish(self) -> None:
        while len(self._sent) < len(self._pieces):
            self._send()
        for piece, (flat, work) in zip(self._pieces, self._sent, strict=True):
            self._group.wait(work)
            parts = torch.split(flat, [p.numel() for p in piece])
            for parameter, part in zip(piece, parts, strict=True):
                parameter.grad = part.view_as(parameter)


def engine_way(engine: anybatch.Engine, case: Case, *, overlap: bool) -> None:
    """Run a step of the engine."""
    vars(gradients)["OVERLAP"] = overlap
    engine.backward(case.x, case.y)


def timed(work: Callable[[], None]) -> float:
    """Return the seconds of the slowest rank."""
    dist.barrier()
    begin = perf_counter()
    work()
    seconds = torch.tensor([perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def run(rank: int, size: int, meet: str, names: list[str], links: list[str], rounds: int) -> Any:
    """Time all ways in the same rounds, in an order that turns; return what rank 0 has found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size)
    found: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(SEED)
        case = CASES[name]()
        engine = anybatch.Engine(case.model, case.loss, micro_batch=case.micro_batch)
        hand = ByHand(case, group_of())
        ways: dict[str, Callable[[], None]] = {
            "by hand, nothing sent": lambda hand=hand: hand.run("nothing sent"),  # type: ignore[misc]
            "by hand, after": lambda hand=hand: hand.run("after"),  # type: ignore[misc]
            "by hand, during": lambda hand=hand: hand.run("during"),  # type: ignore[misc]
            "engine, after": lambda e=engine, c=case: engine_way(e, c, overlap=False),  # type: ignore[misc]
            "engine, during": lambda e=engine, c=case: engine_way(e, c, overlap=True),  # type: ignore[misc]
        }
        found[name] = {"links": {}, "profile": _profile(case, engine, rounds)}
        for link in links:
            with wire(LINKS[link]):
                found[name]["links"][link] = _rounds(case, ways, rounds)
    dist.destroy_process_group()
    return found


def _rounds(case: Case, ways: dict[str, Callable[[], None]], rounds: int) -> Any:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for at in range(-2, rounds):
        for name in list(ways) if at % 2 else list(ways)[::-1]:
            case.model.zero_grad()
            seconds = timed(ways[name])
            if at >= 0:
                times[name].append(seconds)
    return {
        name: {
            "seconds": median(found),
            "speed": _quartiles(times[_slower(name)], found),
        }
        for name, found in times.items()
    }


def _slower(name: str) -> str:
    """Return what a way stands beside: the same loop that sends after backward."""
    return f"{name.split(',', maxsplit=1)[0]}, after"


def _quartiles(above: list[float], below: list[float]) -> list[float]:
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    return [ratios[len(ratios) // 4], median(ratios), ratios[3 * len(ratios) // 4]]


def _profile(case: Case, engine: anybatch.Engine, rounds: int) -> dict[str, float]:
    """Clock the sum of gradients inside steps of the engine that sends after backward.

    Returns:
        Medians of shares of a step: `waiting` for the slower rank to end its backward, `summing`,
        and `last backward`, behind which sums could hide.
    """
    spent = {"waiting": 0.0, "summing": 0.0, "last backward": 0.0}
    summed, autograd = Ranks.gradients, torch.autograd.backward

    def clocked(*args: Any) -> Any:
        begin = perf_counter()
        dist.barrier()
        at_barrier = perf_counter()
        sums = summed(*args)
        spent["waiting"], spent["summing"] = at_barrier - begin, perf_counter() - at_barrier
        return sums

    def backward(*args: Any, **kwargs: Any) -> None:
        begin = perf_counter()
        autograd(*args, **kwargs)
        spent["last backward"] = perf_counter() - begin

    shares: dict[str, list[float]] = {name: [] for name in spent}
    Ranks.gradients = clocked  # type: ignore[assignment, method-assign]
    torch.autograd.backward = backward
    for at in range(-2, rounds):
        case.model.zero_grad()
        step = timed(lambda: engine_way(engine, case, overlap=False))
        if at >= 0:
            for name, seconds in spent.items():
                shares[name].append(seconds / step)
    Ranks.gradients = summed  # type: ignore[method-assign]
    torch.autograd.backward = autograd
    return {name: median(found) for name, found in shares.items()}
