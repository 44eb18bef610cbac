"""Steps in less memory than one lane needs: the least budget, and its cost.

A lane is a micro-batch; lanes wait for each other at BatchNorm. Two networks with BatchNorm have
four floors, by their plans: the undivided batch in memory, a lane of one sample in memory, the
undivided batch with all saved tensors offloaded, and a lane of one sample with all tensors
offloaded that a kernel does not need. Then the full batch runs in two budgets: halfway between the
lowest floor and that of a lane in memory, and half above the latter. It runs in every size of lanes
that fits, in memory and offloading while they run, and as the undivided batch with saved tensors
offloaded, all with `memory=` that budget.

`peak` is the most live bytes of a step, including weights, gradients and buffers. `wall` is the
median (and the quartiles) of time(way) / time(undivided in memory): each step is paired with one of
plain torch before it, every other round backwards. The store is a file. `error` is that of Law 1
(docs/why.md): the gradient of the full batch against torch's own in float64, all tensors as one
vector. Both glibc malloc modes run, each in its own process.
"""

import copy
import json
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import anybatch
from anybatch import Engine
from anybatch.errors import BudgetError
from anybatch.memory.meter import Meter
from benchmarks.agbn.lanes_memory.one import Net
from benchmarks.environment import environment
from benchmarks.modes import in_both_modes
from benchmarks.outofcore.narrow.networks import NETWORKS
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED = 0
LOTS = 1 << 50
Results = dict[str, Any]


class Case:
    """A network, its batch, and torch's own step."""

    def __init__(self, net: Net) -> None:
        torch.manual_seed(SEED)
        self.model, self.loss, self.size = net.make(), net.loss, net.batch
        self.rows = net.rows()
        self.truth = self._truth()

    def plan(self, **options: Any) -> anybatch.Plan:
        """Return a plan that times nothing."""
        self.model.zero_grad()
        return anybatch.plan(self.model, self.loss, self.rows, timed=False, **options)

    def needs(self, **options: Any) -> int:
        """Return the bytes that a refusal names."""
        try:
            self.plan(memory=1024, **options)
        except BudgetError as error:
            return error.needed
        raise AssertionError("a kilobyte is enough")

    def floors(self) -> Results:
        """Return how little is enough, way by way."""
        memory = self.plan(memory=LOTS).memory
        assert memory is not None
        return {
            "undivided": memory.undivided,
            "lanes": self.needs(offload="off"),
            "undivided, away": self.needs(offload="file", micro_batch=self.size),
            "narrow lanes": self.needs(micro_batch=1),
        }

    def torch_step(self) -> float:
        """Return the seconds of torch's own step."""
        self.model.zero_grad()
        start = perf_counter()
        self.loss(self.model(self.rows[0]), self.rows[1]).backward()  # type: ignore[no-untyped-call]
        return perf_counter() - start

    def step(self, engine: Engine) -> float:
        """Return the seconds of one of the engine's."""
        self.model.zero_grad()
        start = perf_counter()
        engine.backward(*self.rows)
        return perf_counter() - start

    def peak(self, engine: Engine) -> int:
        """Return the most live bytes of that."""
        self.model.zero_grad()
        there = [*self.model.parameters(), *self.model.buffers()]
        with Meter(self.rows[0].device, {"there": there}) as meter:
            engine.backward(*self.rows)
        return int(meter.peak)

    def error(self) -> float:
        """Return how far the gradients that are there are from the truth."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        pairs = zip(grads, self.truth, strict=True)
        gap = sum(float((a.double() - b).square().sum()) for a, b in pairs)
        return float((gap / sum(float(b.square().sum()) for b in self.truth)) ** 0.5)

    def _truth(self) -> list[Tensor]:
        model = copy.deepcopy(self.model).double()
        x, y = (t.double() if t.is_floating_point() else t for t in self.rows)
        self.loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        return [p.grad for p in model.parameters() if p.grad is not None]


def ways(case: Case, budget: int) -> dict[tuple[str, int], Engine]:
    """Return what fits: name and samples of a micro-batch -> its engine."""
    found: dict[tuple[str, int], Engine] = {}
    sizes = [1 << k for k in range(case.size.bit_length()) if 1 << k < case.size]
    settings = [("in memory", n, "off") for n in sizes]
    settings += [("leave", n, "file") for n in [*sizes, case.size]]
    for name, n, offload in settings:
        try:
            plan = case.plan(memory=budget, micro_batch=n, offload=offload)
        except BudgetError:
            continue
        found[name, n] = Engine(case.model, case.loss, plan=plan)
    return found


def measured(case: Case, budget: int, rounds: int) -> list[Results]:
    """Every way in a budget."""
    every = ways(case, budget)
    pairs: dict[Any, list[tuple[float, float]]] = {name: [] for name in every}
    for engine in every.values():
        case.step(engine)
    case.torch_step()
    for index in range(rounds):
        for way in list(every) if index % 2 else list(every)[::-1]:
            plain = case.torch_step()
            pairs[way].append((plain, case.step(every[way])))
    rows = []
    for (name, n), engine in every.items():
        peak, error, last = case.peak(engine), case.error(), engine.last
        assert last is not None
        rows.append(
            {
                "way": name,
                "micro_batch": n,
                "peak": peak,
                "predicted": last.predicted_bytes,
                "moved": last.moved_bytes,
                "error": error,
                "wall": [round(cut, 4) for cut in quantiles((b / a for a, b in pairs[name, n]))],
                "seconds": round(median(b for _, b in pairs[name, n]), 5),
            }
        )
    return rows


def one(net: Net, rounds: int) -> Results:
    """The floors of a network, and its steps in two budgets."""
    case = Case(net)
    floors = case.floors()
    low, high = floors["narrow lanes"], floors["lanes"]
    budgets = {"below one lane": (low + high) // 2, "above one lane": 3 * high // 2}
    rows = {
        name: {"budget": budget, "ways": measured(case, budget, rounds)}
        for name, budget in budgets.items()
    }
    case.torch_step()
    return {"batch": net.batch, "floors": floors, "error": case.error(), "budgets": rows}


def one_mode(names: list[str], rounds: int) -> Results:
    """Every network, in this process and its malloc mode."""
    torch.set_num_threads(1)
    found: Results = {}
    for name in names:
        console.print(name)
        found[name] = one(NETWORKS[name], rounds)
    return {"environment": environment(), "networks": found}


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    rounds: Annotated[int, typer.Option(help="timings of every way")] = 3,
    networks: Annotated[str, typer.Option(help="names, semicolon between")] = ";".join(NETWORKS),
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure in both malloc modes, and write results.json."""
    names = networks.split(";")
    if quick:
        names, rounds = names[-1:], 2
    if here:
        print(json.dumps(one_mode(names, rounds)))
        return
    words = ["--networks", ";".join(names), "--rounds", str(rounds)]
    modes = in_both_modes("benchmarks.outofcore.narrow.run", *words)
    write(out / "results.json", {"seed": SEED, "rounds": rounds, "modes": modes})


if __name__ == "__main__":
    typer.run(main)
