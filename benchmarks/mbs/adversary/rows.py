"""The tables of the adversary: outcomes by group, by hiding and the rest, and what went wrong."""

from typing import Any

from benchmarks.mbs.adversary.cases import HIDINGS
from benchmarks.mbs.rows import Results, markdown

OUTCOMES = ("exact", "refused", "not claimed", "crash", "silently wrong")


def _counts(found: dict[str, int]) -> list[str]:
    return [*(str(found.get(outcome, 0)) for outcome in OUTCOMES), str(sum(found.values()))]


def adversary_summary(results: Results) -> str:
    """Coupled cases and honest twins by outcome."""
    rows = [
        ["samples couple", *_counts(results["coupled"])],
        ["honest twins", *_counts(results["twins"])],
    ]
    named = (
        f"{results['named']} of {results['coupled'].get('refused', 0)} refusals name the module."
    )
    return markdown(["", *OUTCOMES, "cases"], rows) + f"\n\n{named}"


def _by(results: Results, key: str, title: str, order: tuple[str, ...] = ()) -> str:
    found: dict[str, Any] = results[key]
    names = [name for name in order if name in found] or list(found)
    rows = [[name, *_counts(found[name])] for name in names]
    return markdown([title, *OUTCOMES, "cases"], rows)


def adversary(results: Results) -> str:
    """Coupled cases by the group of the coupling."""
    return _by(results, "groups", "coupling")


def adversary_hidings(results: Results) -> str:
    """Coupled cases by what hides the coupling."""
    return _by(results, "hidings", "hiding", HIDINGS)


def adversary_ways(results: Results) -> str:
    """Coupled cases by mechanism, dtype, layout and split."""
    keys = ("mechanisms", "dtypes", "layouts", "splits")
    rows = [
        [name, *_counts(count)]
        for key in keys
        for name, count in results[key].items()
    ]  # fmt: skip
    return markdown(["way", *OUTCOMES, "cases"], rows)
