"""Full training steps of the paper's networks, torch's against ours within 64 MiB for each kernel.

A step is forward, loss, backward and the update of SGD. Steps of torch and inside
`anybatch.convolutions` alternate, back to back, with an untimed step before those of each side:
`torch / ours` is the median (and the quartiles) of the paired ratios. The goal is 0.98 at least
where torch has a fast path for all layers, which it has for all networks but the last. Both layouts
of the full model run, in both glibc malloc modes, each mode in a process of its own. The time of
measuring for the choice is listed separately: the seconds of the first step inside. Gradients are
compared after one step of each, from the same weights and random draws.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from benchmarks.environment import environment
from benchmarks.modes import in_both_modes
from benchmarks.results import console, write
from benchmarks.ucudnn.device import refusal, seconds
from benchmarks.ucudnn.models import LARGE, NETWORKS, Network

HERE = Path(__file__).parent
SEED = 0
WORKSPACE = 64 << 20
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
TIMED = 3
"""Steps of each side that are timed in a round."""
QUICK = (LARGE,)
Found = dict[str, Any]


class Step:
    """A training step of a network.

    Args:
        network: which, with `few` samples.
        layout: of the whole model and its inputs.
        device: type of device.
    """

    def __init__(self, network: Network, layout: torch.memory_format, device: str) -> None:
        torch.manual_seed(SEED)
        model = network.make().to(device)
        self._model: nn.Module = model.to(memory_format=layout)  # type: ignore[call-overload]
        x = torch.randn(network.few, *network.image, device=device)
        self._x, self.device = x.contiguous(memory_format=layout), device
        classes = self._model(self._x[:2]).shape[1]
        self._y = torch.randint(classes, (network.few,), device=device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4, momentum=0.9)

    def __call__(self) -> None:
        """Take a step."""
        self._backward()
        self._optimizer.step()

    def gradients(self) -> list[Tensor]:
        """Return all gradients of the weights as they are now; nothing is updated."""
        torch.manual_seed(SEED)
        self._backward()
        return [p.grad.clone() for p in self._model.parameters() if p.grad is not None]

    def _backward(self) -> None:
        self._optimizer.zero_grad()
        F.cross_entropy(self._model(self._x), self._y).backward()  # type: ignore[no-untyped-call]


def compared(step: Step, cache: Path, rounds: int) -> Found:
    """Return what torch's steps and ours take, in turns, and what was chosen."""
    true = step.gradients()
    with anybatch.convolutions(WORKSPACE, cache=cache) as found:
        choosing = seconds(step.gradients, step.device)
        ours = step.gradients()  # measuring draws random numbers, too
    pairs = list[tuple[float, float]]()
    for index in range(rounds):
        sides = [partial(several, step), partial(inside, step, cache)]
        timings = (
            [side() for side in sides] if index % 2 else [side() for side in sides[::-1]][::-1]
        )
        pairs += zip(*timings, strict=True)
    gap = sum(float((a - b).square().sum()) for a, b in zip(ours, true, strict=True))
    norm = sum(float(b.square().sum()) for b in true)
    return {
        "ratio": quantiles([a / b for a, b in pairs]),
        "seconds": [median(side) for side in zip(*pairs, strict=True)],
        "choosing": choosing,
        "error": (gap / norm) ** 0.5,
        "kernels": len(found.chosen),
        "divided": sum(one.divided for one in found.configurations),
    }


def several(step: Step) -> list[float]:
    """Return what steps take after one that is not timed."""
    step()
    return [seconds(step, step.device) for _ in range(TIMED)]


def inside(step: Step, cache: Path) -> list[float]:
    """Return what steps take inside the context, when all is chosen."""
    with anybatch.convolutions(WORKSPACE, cache=cache):
        return several(step)


def one_mode(names: list[str], device: str, rounds: int) -> Found:
    """Measure all networks in this process and its malloc mode."""
    torch.set_num_threads(1)
    found: Found = {name: {} for name in names}
    with TemporaryDirectory() as folder:
        for name in names:
            for layout, memory_format in LAYOUTS.items():
                start, step = perf_counter(), Step(NETWORKS[name], memory_format, device)
                found[name][layout] = compared(step, Path(folder) / "costs.sqlite", rounds)
                console.print(f"{name}, {layout}: {perf_counter() - start:.0f} s")
    return {"environment": environment(), "networks": found}


def main(
    *,
    quick: bool = False,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    rounds: Annotated[int, typer.Option(help="of three pairs of timings each")] = 2,
    networks: Annotated[str, typer.Option(help="names, comma between")] = ",".join(NETWORKS),
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure in both malloc modes, and write results.json."""
    refused = refusal(device)
    if refused is not None:
        console.print(refused)
        return
    names = networks.split(",")
    if quick:
        names, rounds = [*QUICK], 1
    if here:
        print(json.dumps(one_mode(names, device, rounds)))
        return
    words = ["--device", device, "--rounds", str(rounds), "--networks", ",".join(names)]
    modes = in_both_modes("benchmarks.ucudnn.networks.run", *words)
    facts = {"seed": SEED, "rounds": rounds, "device": device, "workspace": WORKSPACE}
    write(out / "results.json", {**facts, "modes": modes})


if __name__ == "__main__":
    typer.run(main)
