"""Models and losses with hidden couplings between samples, each run by an engine and judged.

Every coupling (statistics of samples, orders, shared noise, BatchNorm on a part of the batch,
experts with a capacity, gradients that are changed in backward, state, shapes, permutations,
integers, values that leave torch) is combined with every way of hiding it, and with honest twins of
the same form. The reference is the undivided batch in float64, three steps. The bound is Law 1's
(docs/why.md), in float32 and bfloat16 ten times the distance of the undivided batch in that dtype.
A case ends in one of: exact; refused; not claimed (the plan says not exact, or not shown); silently
wrong (beyond the bound, and the plan says exact); crash (another error, a dead process, or no end).

    python -m benchmarks.mbs.adversary.run --only ghost/none --show    cases whose name holds this
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from benchmarks.environment import environment
from benchmarks.mbs.adversary.cases import CASES, HIDINGS, SEED, Case, draw
from benchmarks.mbs.adversary.forms import FORMS
from benchmarks.mbs.adversary.judge import Verdict, judge
from benchmarks.mbs.jobs import Died, answers
from benchmarks.results import console, write

HERE = Path(__file__).parent


def answer(case: Case) -> Verdict:
    """The verdict on a case; without an undivided batch that runs there is none."""
    try:
        return judge(case)
    except Exception as error:
        return Verdict("no truth", message=f"{type(error).__name__}: {error}"[:300])


def judged(cases: list[Case], jobs: int = 1) -> Iterator[tuple[Case, Verdict]]:
    """The verdict on each case; one that kills its process, or never ends, is a crash."""
    for case, found in answers(answer, cases, jobs=jobs):
        yield case, Verdict("crash", message=str(found)) if isinstance(found, Died) else found


def summary(found: list[tuple[Case, Verdict]]) -> dict[str, Any]:
    """Counts by group, coupling, hiding and the other words; and every case that went wrong."""

    def by(word: Any) -> dict[str, dict[str, int]]:
        counts: dict[str, Counter[str]] = {}
        for case, verdict in found:
            if not case.honest:
                counts.setdefault(word(case), Counter())[verdict.outcome] += 1
        return {key: dict(count) for key, count in sorted(counts.items())}

    twins = Counter(verdict.outcome for case, verdict in found if case.honest)
    coupled = Counter(verdict.outcome for case, verdict in found if not case.honest)
    refused = [
        verdict for case, verdict in found if verdict.outcome == "refused" and not case.honest
    ]
    table: dict[str, dict[str, list[str]]] = {}
    for case, verdict in found:
        if not case.honest:
            table.setdefault(case.coupling, {}).setdefault(case.hiding, []).append(verdict.outcome)
    hidden = [v for c, v in found if not c.honest and v.by_hand and v.outcome != "no truth"]
    return {
        "cases": len(found),
        "coupled": dict(coupled),
        "twins": dict(twins),
        "named": sum(verdict.named for verdict in refused),
        "nothing couples": len(hidden),
        "groups": by(lambda case: FORMS[case.coupling].group),
        "couplings": by(lambda case: case.coupling),
        "hidings": by(lambda case: case.hiding),
        "dtypes": by(lambda case: case.dtype),
        "layouts": by(lambda case: case.layout),
        "mechanisms": by(lambda case: case.mechanism),
        "splits": by(lambda case: case.split),
        "table": {
            coupling: {hiding: ", ".join(outcomes) for hiding, outcomes in row.items()}
            for coupling, row in table.items()
        },
        **{
            key: {case.name: _text(verdict) for case, verdict in found if pick(case, verdict)}
            for key, pick in LISTED.items()
        },
    }


LISTED: dict[str, Any] = {
    "silently wrong": lambda _, verdict: verdict.outcome == "silently wrong",
    "crashes": lambda _, verdict: verdict.outcome == "crash",
    "no truth": lambda _, verdict: verdict.outcome == "no truth",
    "twins refused": lambda case, verdict: case.honest and verdict.outcome == "refused",
    "twins not claimed": lambda case, verdict: case.honest and verdict.outcome == "not claimed",
}


def _text(verdict: Verdict) -> str:
    error = "" if verdict.error is None else f"{verdict.error:.1e} of {verdict.bound:.1e}, "
    hand = {None: "", True: ", by hand right", False: ", by hand wrong"}[verdict.by_hand]
    message = f": {verdict.message}" if verdict.message else ""
    return f"{error}step {verdict.step}{hand}{message}"


def show(case: Case, verdict: Verdict) -> None:
    """Print a case."""
    error = "" if verdict.error is None else f" {verdict.error:.1e} of {verdict.bound:.1e}"
    console.print(f"{verdict.outcome}{error}, step {verdict.step}: {case.name}", highlight=False)
    if verdict.message:
        console.print(f"    {verdict.message}", highlight=False, markup=False)


def main(
    *,
    cases: Annotated[int, typer.Option(help="how many are drawn")] = CASES,
    seed: int = SEED,
    device: str = "cpu",
    jobs: Annotated[int, typer.Option(help="processes, with one thread each")] = 1,
    only: Annotated[str, typer.Option(help="cases whose name holds this; writes nothing")] = "",
    show_all: Annotated[bool, typer.Option("--show", help="print each case")] = False,
    quick: bool = False,
    out: Path = HERE,
) -> None:
    """Draw cases, judge each, and write results.json."""
    torch.set_num_threads(1)
    drawn = [replace(case, device=device) for case in draw(40 if quick else cases, seed)]
    chosen = [case for case in drawn if only in case.name]
    found = []
    for case, verdict in track(
        judged(chosen, jobs), "adversary", total=len(chosen), console=console
    ):
        found.append((case, verdict))
        if show_all or verdict.outcome == "crash":
            show(case, verdict)
    counts = Counter(("twin" if c.honest else "coupled", v.outcome) for c, v in found)
    for (which, outcome), count in sorted(counts.items()):
        console.print(f"{which:>8} {outcome:>15} {count:5d}", highlight=False)
    if not only:
        results = {"seed": seed, "environment": environment(), "steps": 3, **summary(found)}
        results["sizes"] = {"couplings": {"drawn": len(FORMS)}, "hidings": {"drawn": len(HIDINGS)}}
        write(out / "results.json", results)


if __name__ == "__main__":
    typer.run(main)
