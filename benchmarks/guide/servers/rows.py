"""Lemma 3.2's tables in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown

Results = dict[str, Any]


def servers(results: Results) -> str:
    """The simulation, where the lemma is tight."""
    rows = []
    for one in results["simulated"]:
        count = one["servers"]
        row = [f"{one['workers']} workers, {count} servers asked for, jitter {one['jitter']:g}"]
        row.append(f"{(count - 1) / count:.3f}")
        for name in ("fewer", "just", "more"):
            least, most = min(one[name]), max(one[name])
            row.append(f"{least:.3f}" if most - least < 5e-4 else f"{least:.3f} to {most:.3f}")
        rows.append(row)
    head = ["simulated utilisation", "fluid, N - 1", "N - 1 servers", "N", "N + 1"]
    return markdown(head, rows)


def servers_summary(results: Results) -> str:
    """The least and the most of all cells."""
    rows = []
    for jitter in sorted({one["jitter"] for one in results["simulated"]}):
        cells = [one for one in results["simulated"] if one["jitter"] == jitter]
        row = [f"jitter {jitter:g}"]
        for name in ("just", "more"):
            values = [value for one in cells for value in one[name]]
            row.append(f"{min(values):.3f} to {max(values):.3f}")
        off = [
            value / ((one["servers"] - 1) / one["servers"]) - 1
            for one in cells
            for value in one["fewer"]
        ]
        rows.append([*row, f"{min(off):+.1%} to {max(off):+.1%}"])
    head = ["all cells", "utilisation at N", "at N + 1", "at N - 1, beside (N - 1) / N"]
    return markdown(head, rows)


def servers_real(results: Results) -> str:
    """Real processes beside what was predicted."""
    real = results["real"]
    if "refused" in real:
        return f"### Real processes\n\nThe kernel refuses: `{real['refused']}`"
    rows = []
    for one in real["cases"]:
        before, found = one["predicted"], one["measured"]
        values = [before["formula"], before["simulated"], found["utilisation"]]
        error = found["utilisation"] / before["formula"] - 1
        row = [one["name"], str(one["servers"]), *(f"{value:.3f}" for value in values)]
        rows.append([*row, f"{error:+.1%}"])
    head = ["4 workers", "servers", "formula", "simulated", "measured", "measured / formula"]
    about = (
        "### Real processes\n\nUtilisation. As in the lemma, 2 S_p N_w / (B_ps T_C) is 3.89, so it "
        "asks for 4 servers; with links that carry both ways at once the formula asks for 2. Where "
        "nothing is pulled ahead the formula is a lower bound, of workers that all transfer at the "
        "same moment. Where both ways are used at once, and where workers' own links are narrow, "
        "processes stay below formula and simulation; why was not looked into."
    )
    return f"{about}\n\n{markdown(head, rows)}"
