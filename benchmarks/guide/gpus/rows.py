"""Lemma 3.1 and the refined model beside real processes, as tables in markdown."""

from collections.abc import Iterator
from typing import Any

from benchmarks.mbs.rows import markdown

Results = dict[str, Any]


def _cells(results: Results) -> Iterator[tuple[str, int, float, float, list[float]]]:
    """Loop, processes, seconds by the lemma and by the refined model, and as measured."""
    for name, by in results["measured"].items():
        before = results["predicted"][name]
        for count, one in by.items():
            yield (
                name,
                int(count),
                before["lemma"][count],
                before["refined"][count],
                one["quartiles"],
            )


def guide_gpus(results: Results) -> str:
    """A line for each loop and number of processes."""
    head = ["loop", "processes", "measured, s (quartiles)", "lemma", "refined model"]
    rows = []
    for name, count, lemma, refined, (low, middle, high) in _cells(results):
        row = [name, str(count), f"{middle:.3f} ({low:.3f} to {high:.3f})"]
        row += [f"{one:.3f} ({one / middle - 1:+.1%})" for one in (lemma, refined)]
        rows.append(row)
    return markdown(head, rows)


def guide_gpus_summary(results: Results) -> str:
    """The worst error by the number of processes."""
    head = ["processes", "loops", "lemma: worst error", "refined model: worst error"]
    cells = [cell for cell in _cells(results) if cell[1] > 1]
    rows = []
    for count in sorted({cell[1] for cell in cells}):
        here = [(lemma, refined, q[1]) for _, g, lemma, refined, q in cells if g == count]
        worst = [
            max((lemma / middle - 1 for lemma, _, middle in here), key=abs),
            max((refined / middle - 1 for _, refined, middle in here), key=abs),
        ]
        rows.append([str(count), str(len(here)), *(f"{one:+.1%}" for one in worst)])
    return markdown(head, rows)
