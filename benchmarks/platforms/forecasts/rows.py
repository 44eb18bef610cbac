"""Forecasts beside peaks, as a table in markdown."""

from itertools import groupby
from typing import Any

from benchmarks.mbs.rows import Results, markdown


def _group(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["model"], row["precision"], row.get("mechanism", "")


def forecasts(results: Results) -> str:
    """A row for each model, precision and mechanism, and the device."""
    where, rows = results["environment"], []
    for (model, precision, mechanism), same in groupby(sorted(results["rows"], key=_group), _group):
        found = list(same)
        if not mechanism:
            rows.append([model, precision, "refused", str(len(found)), "", ""])
            continue
        ratios = [row["peak"] / row["predicted"] for row in found]
        counts = str(len(found)), f"{min(ratios):.3f}", f"{max(ratios):.3f}"
        rows.append([model, precision, mechanism, *counts])
    head = ["model", "precision", "mechanism", "plans", "least held / foreseen", "most"]
    device = f"{where['gpu']}, torch {where['torch']}, CUDA {where['cuda']}."
    return "\n".join([device, "", markdown(head, rows)])
