"""Figures 2 and 3 of the guide, measured here.

Figure 2: within a fixed memory a larger mini-batch leaves less workspace, so slower algorithms are
chosen for its convolutions, and past some size the samples a second fall. A network with windows of
31, 29 and 27 is trained undivided. The workspace of `anybatch.convolutions` is the memory less the
forecast peak of the step. Kernels run in one piece, as in the guide, and divided, which fits fast
algorithms into less workspace. Torch's own kernels are listed too.

Figure 3: a range of mini-batches converges alike. A small network is trained on the digits with
mini-batches of 16 up to all samples, otherwise alike, with AdamW at one learning rate. The table
has the test error by epoch, the median of three seeds.
"""

import json
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional

import anybatch
from anybatch.cli.settings import Settings
from anybatch.cli.train import train
from benchmarks.environment import environment
from benchmarks.guide.figures.pictures import draw
from benchmarks.results import console, write
from benchmarks.ucudnn.models import LARGE, NETWORKS

HERE = Path(__file__).parent
SIZES = (2, 4, 8, 12, 16, 20, 24)
SPARE = 4 << 20
"""Bytes of the memory that are left beside a step of the largest mini-batch."""
LEAST = 1 << 20
POLICIES = {"undivided": "undivided", "anybatch": "powerOfTwo"}
"""What a result is called -> policy."""
TIMED = 3
BATCHES = (16, 64, 128, 256, 512, 1437)
EPOCHS, SEEDS = 20, (0, 1, 2)


def throughput(sizes: tuple[int, ...], timed: int) -> list[dict[str, Any]]:
    """Return samples a second by mini-batch, with the workspace that is left."""
    network = NETWORKS[LARGE]
    torch.manual_seed(0)
    model = network.make()
    peaks = {n: _peak(model, _batch(network.image, n)) for n in sizes}
    memory = peaks[max(sizes)] + SPARE
    found = []
    for n in sizes:
        x, y = _batch(network.image, n)
        space = memory - peaks[n]
        row: dict[str, Any] = {"samples": n, "workspace": space, "memory": memory}
        row["torch"] = n / _seconds(model, x, y, timed)
        for name, policy in POLICIES.items():
            with tempfile.TemporaryDirectory() as folder:
                options: dict[str, Any] = {"cache": Path(folder) / "costs.sqlite", "policy": policy}
                with anybatch.convolutions(max(space, LEAST), **options):
                    row[name] = n / _seconds(model, x, y, timed)
        console.print(f"{n} samples: {row}")
        found.append(row)
    return found


def _batch(image: tuple[int, ...], n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, *image), torch.randint(10, (n,))


def _peak(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> int:
    plan = anybatch.plan(
        model, functional.cross_entropy, batch, memory="1TiB", timed=False, offload="off"
    )
    assert plan.memory is not None
    return plan.memory.undivided


def _seconds(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, timed: int) -> float:
    """Return the seconds of a step, after one in which kernels are chosen, and one more."""
    timings = []
    for _ in range(2 + timed):
        model.zero_grad()
        start = perf_counter()
        functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        timings.append(perf_counter() - start)
    return median(timings[2:])


def convergence(batches: tuple[int, ...], epochs: int, seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return the test error of every epoch by mini-batch: the median of the seeds."""
    found = {}
    for batch in batches:
        runs = [_errors(batch, epochs, seed) for seed in seeds]
        found[str(batch)] = [median(errors) for errors in zip(*runs, strict=True)]
        console.print(f"mini-batches of {batch}: {found[str(batch)][-1]:.3f}")
    return found


def _errors(batch: int, epochs: int, seed: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        train(
            Settings(
                data="digits",
                model="cnn",
                batch_size=batch,
                micro_batch=min(batch, 64),
                epochs=epochs,
                schedule="constant",
                seed=seed,
                threads=1,
                out=out,
            )
        )
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [1 - row["test_accuracy"] for row in rows if row["kind"] == "epoch"]


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
) -> None:
    """Run both, draw them, and write results.json."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {"environment": environment(), "seeds": len(SEEDS)}
    results["figure 3"] = convergence(
        *((BATCHES[-1:], 1, SEEDS[:1]) if quick else (BATCHES, EPOCHS, SEEDS))
    )
    results["figure 2"] = throughput(*((SIZES[:1], 1) if quick else (SIZES, TIMED)))
    write(out / "results.json", results)
    draw(results, out)


if __name__ == "__main__":
    typer.run(main)
