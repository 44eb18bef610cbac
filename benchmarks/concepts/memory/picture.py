"""The steps as a picture: one panel above the other, on one scale."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MIB = 1 << 20


def draw(results: dict[str, Any], folder: Path) -> None:
    """Draw memory.png into a folder."""
    picture(results["ways"]).savefig(folder / "memory.png", dpi=110)


def picture(ways: list[dict[str, Any]]) -> Figure:
    """A panel for each way: live bytes over the share of its kernels that have run."""
    figure = Figure(figsize=(7.2, 1.5 * len(ways) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(ways), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, way in zip(panels, ways, strict=True):
        live = [one / MIB for one in way["live"]]
        share = [100 * (i + 1) / len(live) for i in range(len(live))]
        axes.fill_between(share, live, step="pre", color="#0072b2", alpha=0.75, linewidth=0)
        axes.axhline(way["peak"] / MIB, color="#303030", linewidth=0.8, linestyle=":")
        if way["budget"] is not None:
            axes.axhline(way["budget"] / MIB, color="#d55e00", linewidth=1.0, linestyle="--")
        exact = "" if way["exact"] else ", not exact"
        title = f"{way['name']}: peak {way['peak'] / MIB:.1f} MiB{exact}"
        axes.set_title(title, fontsize="small", loc="left")
        axes.grid(visible=True, alpha=0.3)
        axes.set(xlim=(0, 100), ylim=(0, None))
    panels[len(panels) // 2].set_ylabel("live bytes, MiB")
    panels[-1].set_xlabel("kernels of the step that have run, %")
    return figure
