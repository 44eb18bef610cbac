"""The tables of the prediction, from its results file to markdown."""

from collections.abc import Iterator
from typing import Any

Results = dict[str, Any]
Row = list[str]
MODELS = {
    "resnet50_batchnorm": "ResNet-50, BatchNorm",
    "resnet50_groupnorm": "ResNet-50, GroupNorm",
    "unet": "U-Net",
    "transformer": "transformer",
    "densenet": "DenseNet-121, growth 16",
    "lstm": "LSTM",
}
MB = 10**6


def _markdown(head: Row, rows: list[Row]) -> str:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def _model(name: str) -> str:
    return MODELS.get(name, name)


def spare(cell: Results) -> int:
    """Bytes that were foreseen and not held in either step; below zero it was too little."""
    return int(cell["predicted"] - max(cell["first"], cell["measured"]))


def above(cell: Results) -> float:
    """How much more was foreseen than the second step held, as a share of that."""
    return float(cell["predicted"] / cell["measured"] - 1)


def good(cells: list[Results], goal: float) -> bool:
    """Whether nothing was foreseen too low, nor too high by more than the goal."""
    return all(spare(cell) >= 0 and above(cell) <= goal for cell in cells)


def _where(cell: Results) -> str:
    return f"{cell['micro_batch']} of {cell['batch']}, {cell['way']}"


def _worst(cells: list[Results]) -> Row:
    low, high = min(cells, key=spare), max(cells, key=above)
    return [f"{spare(low):,} B ({_where(low)})", f"{above(high):.2%} ({_where(high)})"]


def _cells(pairs: Results) -> list[Results]:
    return [cell for pair in pairs.values() for cell in pair["ways"]]


def _yes(value: object) -> str:
    return "yes" if value else "no"


def prediction_summary(results: Results) -> str:
    """A row for each model: its worst over sizes, ways and optimizers, and the goal."""
    rows = []
    for name, pairs in results["live"].items():
        cells, goal = _cells(pairs), results["goals"][name]
        rungs = ", ".join(dict.fromkeys(pair["how"] for pair in pairs.values()))
        slowest = max(pair["seconds"] for pair in pairs.values())
        row = [_model(name), str(len(cells)), *_worst(cells), f"{goal:.0%}"]
        rows.append([*row, _yes(good(cells, goal)), rungs, f"{slowest:.1f}"])
    head = ["steps", "least to spare", "most above", "goal", "reached", "by", "seconds"]
    return _markdown(["model", *head], rows)


def prediction_live(results: Results) -> str:
    """A row for each model, optimizer and way."""
    rows = []
    for name, pairs in results["live"].items():
        for optimizer, pair in pairs.items():
            for way in dict.fromkeys(cell["way"] for cell in pair["ways"]):
                cells = [cell for cell in pair["ways"] if cell["way"] == way]
                low, high = min(map(spare, cells)), max(map(above, cells))
                peaks = [cell["measured"] / MB for cell in cells]
                span = f"{min(peaks):.0f} to {max(peaks):.0f}"
                what = f"{_model(name)}, {optimizer}, {way}"
                rows.append([what, str(len(cells)), span, f"{low:,}", f"{high:.3%}"])
    head = ["sizes", "peak, MB", "least to spare, B", "most above"]
    return _markdown(["model, optimizer, gradients", *head], rows)


def prediction_referee(results: Results) -> str:
    """The meter beside the allocator's own count, a row for each model and optimizer."""
    rows = []
    for name, optimizer, one in _refereed(results):
        differs = one["meter"] - one["allocator"]
        more = one["inside"] / one["meter"] - 1
        cells = [f"{one['meter']:,}", f"{one['allocator']:,}", f"{differs:,}", f"{more:.2%}"]
        rows.append([f"{_model(name)}, {optimizer}", *cells])
    head = ["meter, B", "allocator after kernels, B", "meter more by, B", "inside kernels, more"]
    return _markdown(["model, optimizer", *head], rows)


def _refereed(results: Results) -> Iterator[tuple[str, str, Results]]:
    for name, pairs in results["live"].items():
        for optimizer, pair in pairs.items():
            if "referee" in pair:
                yield name, optimizer, pair["referee"]


def prediction_growth(results: Results) -> str:
    """Growth of the process, a row for each model, a column for each malloc mode."""
    found = results.get("growth", {})
    modes = list(next(iter(found.values()))) if found else []
    rows = []
    for name, cells in found.items():
        row = [_model(name), f"{cells[modes[0]]['predicted'] / MB:.0f}"]
        for mode in modes:
            cell = cells[mode]
            total = (cell["growth"] + cell["states"]) / MB
            row.append(f"{total:.0f}, {cell['ratio']:.2f}, {_yes(cell['within'])}")
        rows.append(row)
    head = ["model", "foreseen, MB", *(f"{mode}: MB, ratio, within goal" for mode in modes)]
    return _markdown(head, rows)


def prediction(results: Results) -> str:
    """All tables of the page but the summary."""
    parts = [
        prediction_live(results),
        "The meter, and what torch's allocator says of the same step:",
        prediction_referee(results),
    ]
    if "growth" in results:
        parts += ["Growth of the process, by malloc mode:", prediction_growth(results)]
    return "\n\n".join(parts)
