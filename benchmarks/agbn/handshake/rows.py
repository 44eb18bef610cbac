"""The results of an exchange that is put off, as a table in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown


def handshake(results: dict[str, Any]) -> str:
    """A line for each step: its seconds both ways, and the gain."""
    rows = []
    for name, one in results["cases"].items():
        low, middle, high = one["gain"]
        cells = [f"{1000 * one['seconds'][way]:.1f}" for way in ("waits", "put off")]
        rows.append([name, *cells, f"{middle:.3f} ({low:.3f} to {high:.3f})", str(one["rounds"])])
    return markdown(["step of a rank", "waits, ms", "put off, ms", "gain", "rounds"], rows)
