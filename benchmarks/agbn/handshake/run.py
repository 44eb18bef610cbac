"""The first exchange of a step over ranks, and the gain from putting it off.

Two real gloo processes of one thread each run on one machine of two cores. `waits` exchanges the
facts of all ranks before the first micro-batch, in every step. `put off` sends them with the
denominators of the loss, after the first forward, if they have been the same in several steps. The
gain is seconds(waits) / seconds(put off) of the slowest rank, paired within a round: the median and
the quartiles. Steps that need no denominators at the first forward (lanes, two passes) exchange
their facts before anything else is sent, so nothing can be gained there.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from torch import nn

from anybatch import Engine
from anybatch.distributed import handshake
from benchmarks.agbn.overlap.steps import SEED, Case, _quartiles, resnet, timed, transformer
from benchmarks.environment import environment
from benchmarks.results import console, write

HERE = Path(__file__).parent
RANKS = 2
WAYS = {"waits": 1 << 60, "put off": handshake.TIMES}
"""Name -> steps after which the facts of all ranks are expected."""

WARM = handshake.TIMES + 2
"""Steps of each way before it is timed, in every round: the first ones expect nothing."""

TIMED = 3
"""Steps of a way in a round; the sum of their seconds counts."""


def mlp(rows: int, micro_batch: int) -> Case:
    """An MLP of 64 channels, which takes less than a millisecond."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = torch.randn(rows, 64), torch.randint(10, (rows,))
    return Case(model, nn.CrossEntropyLoss(), x, y, micro_batch)


CASES: dict[str, tuple[Callable[[], Case], int]] = {
    "MLP, 16 rows, 8 at a time": (lambda: mlp(16, 8), 60),
    "transformer, 4 rows, at once": (lambda: transformer(4, 4), 40),
    "ResNet-18, 8 rows, at once": (lambda: resnet(8, 8), 12),
}
"""Name -> a step, and its rounds."""


def _rank(rank: int, meet: str, name: str, rounds: int, answer: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=RANKS)
    torch.manual_seed(SEED)
    case = CASES[name][0]()
    engine = Engine(case.model, case.loss, micro_batch=case.micro_batch)

    def step() -> None:
        case.model.zero_grad()
        engine.backward(case.x, case.y)

    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for at in range(rounds):
        for way in list(WAYS) if at % 2 else list(WAYS)[::-1]:
            vars(handshake)["TIMES"] = WAYS[way]
            for _ in range(WARM):
                step()
            found[way].append(sum(timed(step) for _ in range(TIMED)) / TIMED)
    if rank == 0:
        gain = _quartiles(found["waits"], found["put off"])
        one = {way: median(seconds) for way, seconds in found.items()}
        Path(answer).write_text(json.dumps({"seconds": one, "gain": gain, "rounds": rounds}))
    dist.destroy_process_group()


def of_ranks(name: str, rounds: int) -> Any:
    """Return what rank 0 has found of one case."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        work = (str(Path(folder) / "meet"), name, rounds, str(answer))
        mp.spawn(_rank, args=work, nprocs=RANKS)  # type: ignore[attr-defined, no-untyped-call]
        return json.loads(answer.read_text())


def main(
    *, quick: bool = False, out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE
) -> None:
    """Measure every case and write results.json."""
    found = {}
    for name, (_, rounds) in list(CASES.items())[: 1 if quick else None]:
        console.print(name)
        found[name] = of_ranks(name, 2 if quick else rounds)
    torch.set_num_threads(1)
    write(out / "results.json", {"seed": SEED, "environment": environment(), "cases": found})


if __name__ == "__main__":
    typer.run(main)
