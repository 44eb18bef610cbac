"""What has become of the draws, as tables in markdown."""

from collections import Counter
from typing import Any

from benchmarks.mbs.rows import markdown

Results = dict[str, Any]
ENDS = ("in budget", "refused", "refused too early", "said too little", "over", "failed", "killed")


def ended(draw: Results) -> str:
    """Return how a draw has ended, in a word or two of `ENDS`."""
    if draw["ended"] == "refused" and not draw["true"]:
        return "refused too early"
    if draw["ended"] == "refused" and not draw["as needed"]:
        return "said too little"
    found: str = draw["ended"]
    return found


def guide_draws(results: Results) -> str:
    """A line for each network, and one for all."""
    networks = sorted({one.get("network", "killed") for one in results["draws"]})
    head = ["network", "draws", *ENDS, "fullest step"]
    rows = [
        _row(name, [one for one in results["draws"] if one.get("network", "killed") == name])
        for name in networks
    ]
    return markdown(head, [*rows, _row("all", results["draws"])])


def guide_draws_summary(results: Results) -> str:
    """How all of them ended."""
    return markdown(["", "draws", *ENDS, "fullest step"], [_row("all", results["draws"])])


def guide_draws_asked(results: Results) -> str:
    """A line for each request to a plan."""
    by: dict[str, list[Results]] = {}
    for one in results["draws"]:
        requests = one.get("asked", {})
        words = ", ".join(f"{name}={value!r}" for name, value in requests.items()) or "nothing"
        by.setdefault(f"`{words}`" if requests else words, []).append(one)
    head = ["asked", "draws", *ENDS, "fullest step"]
    return markdown(head, [_row(name, every) for name, every in sorted(by.items())])


def _row(name: str, draws: list[Results]) -> list[str]:
    """Return the line of some draws: how they ended, and the most of a budget that was held."""
    counts = Counter(ended(one) for one in draws)
    fills = [max(one["peaks"]) / one["budget"] for one in draws if "peaks" in one]
    most = f"{max(fills):.1%} of its budget" if fills else "-"
    return [name, str(len(draws)), *(str(counts[end]) for end in ENDS), most]
