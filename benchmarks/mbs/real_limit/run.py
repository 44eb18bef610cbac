"""A training whose batch does not fit, under a limit that the kernel enforces.

ResNet-20 with GroupNorm trains on digits at 32x32 for 20 steps, each training in a child process.
The limit is RLIMIT_DATA: the bytes that the process maps when model and data are ready, plus the
budget, by default half of the live bytes of the undivided batch. Past it malloc fails, in torch and
in its kernels alike. The plain training (the full batch at once) runs without and with the limit.
Every other subject that finishes under it is compared with the plain one without: in float64 losses
and weights agree to 1e-9, in float32 they are as near as plain trainings that differ only in the
order of their rows. One of those is held out and compared like a subject. Both glibc malloc modes
run.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.mbs.choice.meter import Meter
from benchmarks.mbs.loops import undivided
from benchmarks.mbs.models import ResNet
from benchmarks.mbs.problem import Problem
from benchmarks.mbs.real_limit.compare import compare
from benchmarks.mbs.real_limit.limited import PLAIN, Ended, limited
from benchmarks.mbs.real_limit.training import SEED, Run, Trained, mini_batches
from benchmarks.results import console, write

HERE = Path(__file__).parent
SUBJECTS: dict[str, str] = {  # name -> its step, package.module:function
    "plain": PLAIN,
    "anybatch": "benchmarks.mbs.real_limit.ours:make",
}
MODES = ("default", "large")
ORDERS = {"float64": (1,), "float32": (1, 2, 3, 4, 5)}  # seeds of the shuffles: 15 pairs
QUICK = Run(batch=32, steps=2, blocks=(1,))
Results = dict[str, Any]


def undivided_peak(run: Run) -> int:
    """The most live bytes of a step of the undivided batch."""
    inputs, targets = mini_batches(dataclasses.replace(run, steps=1))[0]
    model = ResNet(blocks=run.blocks).to(inputs.dtype)
    loss_fn = torch.nn.CrossEntropyLoss()
    problem = Problem(model, loss_fn, None, inputs, targets, run.batch)
    meter = Meter(problem)
    with meter:
        undivided(problem, run.batch)
    peak: int = meter.peak
    return peak


def cells(ended: Ended, budget: int | None) -> Results:
    """One training as the results file keeps it."""
    found = dataclasses.asdict(ended)
    del found["environment"], found["ready_bytes"]  # the latter is the interpreter's and torch's
    if ended.seconds is not None:
        found["seconds"] = round(ended.seconds, 2)
    return found | {"budget_bytes": budget, "steps": len(ended.losses)}


def one_mode(run: Run, budget: int, malloc: str) -> Results:
    """Every subject with the limit, and the plain training without, in one malloc mode."""
    console.print(f"malloc mode {malloc}")
    free = limited(PLAIN, run, None, malloc=malloc)
    rows = {"plain, no limit": cells(free, None)}
    for name, make in SUBJECTS.items():
        console.print(f"  {name}")
        rows[name] = cells(limited(make, run, budget, malloc=malloc), budget)
    return {"environment": free.environment, "trainings": rows}


def _trained(make: str, run: Run, budget: int | None, folder: Path) -> Trained | str:
    """A training with its weights, or the error that it died of."""
    path = folder / "weights.pt"
    ended = limited(make, run, budget, weights=path)
    if ended.outcome != "finished":
        return ended.error
    return Trained(ended.losses, torch.load(path, weights_only=True))


def _verdict(other: Trained | str, undivided: Trained, orders: list[Trained]) -> Results:
    if isinstance(other, str):
        return {"died": other}
    found = compare(other, undivided, orders)
    return dataclasses.asdict(found) | {"same": found.same}


def comparisons(run: Run, budgets: dict[str, int]) -> Results:
    """Each subject under the limit against the plain training without it, in both types.

    To try the yardstick itself, one plain training in another order is held out of it and
    compared like a subject.
    """
    rows: Results = {}
    with tempfile.TemporaryDirectory() as name:
        for dtype, orders in ORDERS.items():
            console.print(f"comparing in {dtype}")
            typed, folder = dataclasses.replace(run, dtype=dtype), Path(name)
            ordered = [dataclasses.replace(typed, order=order) for order in (0, *orders)]
            plain = [_trained(PLAIN, one, None, folder) for one in ordered]
            finished = [one for one in plain if isinstance(one, Trained)]
            if len(finished) < len(plain):
                died = [one for one in plain if isinstance(one, str)]
                raise RuntimeError(
                    "the plain training must finish without a limit to be compared with; it "
                    f"died: {died}: free some memory, or take a smaller run"
                )
            rows[dtype] = {"plain, other order": _verdict(finished[1], finished[0], finished[2:])}
            for subject, make in SUBJECTS.items():
                if make != PLAIN:
                    other = _trained(make, typed, budgets[dtype], folder)
                    rows[dtype][subject] = _verdict(other, finished[0], finished[1:])
    return rows


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    budget: Annotated[int, typer.Option(help="bytes; 0 is half the undivided peak")] = 0,
) -> None:
    """Train with and without the limit, compare, and write results.json."""
    run = QUICK if quick else Run()
    peaks = {dtype: undivided_peak(dataclasses.replace(run, dtype=dtype)) for dtype in ORDERS}
    scale = {dtype: peak / peaks["float32"] for dtype, peak in peaks.items()}
    budgets = {
        dtype: int(budget * scale[dtype]) if budget else peak // 2 for dtype, peak in peaks.items()
    }
    results: Results = {
        "seed": SEED,
        "limit": "RLIMIT_DATA",
        "undivided_peak_bytes": peaks,
        "budget_bytes": budgets,
        "sizes": {"resnet20 on digits": {"batch": run.batch, "steps": run.steps}},
        "modes": {mode: one_mode(run, budgets["float32"], mode) for mode in MODES},
        "comparisons": comparisons(run, budgets),
    }
    write(out / "results.json", results)


if __name__ == "__main__":
    typer.run(main)
