"""The tables and figures of the u-cuDNN paper: the choices of each policy, by workspace.

The kernels of each network are recorded from one of its training steps, and their parts are
measured once, by every algorithm, on micro-batches of 1, 2, 4, ... and all samples; of AlexNet on
every number of samples, too. All tables are choices on these same measurements, in one file:
`undivided` has parts of all samples only, `powerOfTwo` and `all` are the paper's policies, WR gives
each kernel a workspace and WD all of them one total. A choice other than torch's kernel counts only
where it is clearly faster than that; where the best is not twice as fast it must win a duel,
alternating with torch's, as in the library. Sums are of convolutions alone. A layer whose input
needs no gradient has no kernel for it, so AlexNet has 14 kernels here and 15 in the paper.

On a CPU torch has a fast path for the usual layers, and they stay torch's, as the tables show. The
paper's results on a GPU need layers whose fast algorithm wants workspace; here those are large
windows, so a network of these is included. Batches are a CPU's. `seconds` is the sum of the
measured parts; the last table has kernels that were really run, alternating with torch's, and their
forecasts. It runs in glibc's large malloc mode, torch's best.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from anybatch.conv.measure import Costs
from benchmarks.environment import environment
from benchmarks.modes import in_mode
from benchmarks.results import console, write
from benchmarks.ucudnn.device import refusal
from benchmarks.ucudnn.listen import listen
from benchmarks.ucudnn.models import LARGE, MODULES, NETWORKS, Network
from benchmarks.ucudnn.paper import sections
from benchmarks.ucudnn.paper.checks import check
from benchmarks.ucudnn.paper.choices import ALL, POWERS, WORKSPACES, Kernel, make_fronts
from benchmarks.ucudnn.paper.figures import draw

HERE = Path(__file__).parent
SEED = 0
PAPERS, CONV2 = "alexnet", "conv2"
QUICK = (LARGE,)
Found = dict[str, Any]


class Bench:
    """What is measured, in one file.

    Args:
        device: type of device.
        cache: the file.
        rounds: pairs of timings of a kernel that is run.
    """

    def __init__(self, device: str, cache: Path, rounds: int) -> None:
        self._device, self._cache, self._rounds = device, cache, rounds
        self._costs = Costs(cache)

    def kernels(self, network: Network) -> tuple[list[Kernel], Found]:
        """Return a network's kernels with their fronts, and what choosing took."""
        found = [Kernel(recorded) for recorded in listen(network, self._device)]
        took = make_fronts(self._costs, found, network.batch, POWERS, WORKSPACES[-1])
        return found, {POWERS: asdict(took)}

    def network(self, name: str) -> Found:
        """Return all that is said of a network."""
        network = NETWORKS[name]
        kernels, took = self.kernels(network)
        if name == PAPERS:
            more = make_fronts(self._costs, kernels, network.batch, ALL, sections.MIDDLE)
            took[ALL] = asdict(more)
            took[ALL]["measuring"] += took[POWERS]["measuring"]  # whose parts it found in the file
        count = sum(kernel.recorded.count for kernel in kernels)
        result: Found = {"batch": network.batch, "took": took, "each": sections.each(kernels)}
        result |= {"unique": len(kernels), "kernels": count}
        result |= {"memory": sections.memory(kernels, network.batch)}
        result |= {"against": sections.against(kernels)}
        result |= {"shares": sections.shares(kernels, WORKSPACES[0] * count)}
        result |= {"cliff": sections.cliff(kernels)}
        if name == PAPERS:
            result["conv2"] = sections.layer(kernels, CONV2)
        if name in (PAPERS, LARGE):
            run = [k for k in kernels if name == LARGE or k.recorded.layer == CONV2]
            result["checks"] = check(run, network.batch, sections.MIDDLE, self._cache, self._rounds)
        return result

    def module(self, name: str) -> Found:
        """Return what is said of a module of parallel branches."""
        network = MODULES[name]
        kernels, took = self.kernels(network)
        count = sum(kernel.recorded.count for kernel in kernels)
        return {"batch": network.batch, "took": took, "kernels": count} | {
            "totals": sections.branches(kernels)
        }


def measured(names: list[str], device: str, rounds: int) -> Found:
    """Measure everything in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    found: Found = {"environment": environment(), "device": device, "seed": SEED, "rounds": rounds}
    with TemporaryDirectory() as folder:
        bench = Bench(device, Path(folder) / "costs.sqlite", rounds)
        for part, subjects, do in (
            ("networks", NETWORKS, bench.network),
            ("modules", MODULES, bench.module),
        ):
            found[part] = {}
            for name in (name for name in subjects if name in names):
                start = perf_counter()
                found[part][name] = do(name)
                console.print(f"{name}: {perf_counter() - start:.0f} s")
    return found


def main(
    *,
    quick: bool = False,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    rounds: Annotated[int, typer.Option(help="pairs of timings")] = 5,
    networks: Annotated[str, typer.Option(help="names, comma between")] = "",
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure, choose, and write results.json and the figures."""
    refused = refusal(device)
    if refused is not None:
        console.print(refused)
        return
    names = networks.split(",") if networks else [*NETWORKS, *MODULES]
    if quick:
        names, rounds = [name for name in QUICK if name in names], 2
    if here:
        print(json.dumps(measured(names, device, rounds)))
        return
    words = ["--device", device, "--rounds", str(rounds), "--networks", ",".join(names)]
    found = in_mode("large", "benchmarks.ucudnn.paper.run", *words)
    write(out / "results.json", found)
    draw(found, out)


if __name__ == "__main__":
    typer.run(main)
