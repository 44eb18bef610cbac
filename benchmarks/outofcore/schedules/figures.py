"""The paper's Figures 3 to 5 of planned and simulated steps, and the speed of every window.

    python -m benchmarks.outofcore.schedules.figures        draws them anew from results.json

Figure 3 is of ResNet-50, as the paper's is. Its images a second and its memory are measured ones;
these are a simulator's, so what compares is the shape of the curves and where they end. Colours are
those of Okabe and Ito, and every line has a mark of its own.
"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.outofcore.schedules.cases import MEASURED, NETWORKS
from benchmarks.outofcore.schedules.reserved import LIMITED
from benchmarks.outofcore.schedules.rows import GIB, PLANNED, POLICIES, machines, networks
from benchmarks.results import console, read

HERE = Path(__file__).parent
Results = dict[str, Any]
Line = tuple[Sequence[float], Sequence[float]]
SPEEDS = {
    "memory": ("in memory", "#000000", ":", ""),
    "bound": ("bound of every schedule", "#000000", "-", ""),
    "default": ("default", "#0072b2", "-", "o"),
    "window": ("the paper's policy", "#d55e00", "--", "s"),
    "with recomputation": ("default, recomputing", "#009e73", "-.", "^"),
}
KINDS = dict(zip(LIMITED, (("#d55e00", "s"), ("#009e73", "^"), ("#0072b2", "o")), strict=True))
PHYSICAL: dict[str, Any] = {"color": "#a00000", "linestyle": "--", "linewidth": 1.2}
PAPERS = {"best fit, caching": "schedule alone", "40 MiB and a pool": "virtual addressing"}


def budgets(results: Results) -> Figure | None:
    """Figure 3: the largest budget that can be defined, and what is reserved at it."""
    name = MEASURED[0]
    sizes = dict(networks(results)).get(name, {})
    figure, grid = _grid(len(PLANNED), len(LIMITED), height=2.3)
    for axes, (policy, allocator) in zip(grid, product(PLANNED, LIMITED), strict=True):
        found = {
            n: one["budgets"][policy][allocator] for n, one in sizes.items() if "budgets" in one
        }
        there = {int(n): one for n, one in found.items() if one}
        for key, label, color, mark in (
            ("reserved", "reserved", "#009e73", "s"),
            ("budget", "budget defined", "#0072b2", "o"),
        ):
            values = [one[key] / GIB for one in there.values()]
            axes.plot(list(there), values, marker=mark, color=color, label=label, markersize=4)
        axes.axhline(results["budget"] / GIB, label="memory", **PHYSICAL)
        paper = f" ({PAPERS[allocator]})" if allocator in PAPERS else ""
        axes.set_title(f"{POLICIES[policy]}\n{allocator}{paper}", fontsize="small")
        axes.set_ylim(0, 1.1 * results["budget"] / GIB)
        axes.set_xlim(0, 1.05 * max(map(int, sizes), default=1))
        axes.set(xlabel="batch", ylabel="GiB")
    return _legend(figure, grid) if sizes else None


def speeds(results: Results) -> Figure | None:
    """Figure 4: images a second against the batch, on every machine."""
    names, there = [name for name, _ in networks(results)], machines(results)
    if not names:
        return None
    figure, grid = _grid(len(names), len(there), height=2.0)
    sizes = dict(networks(results))
    for axes, (name, machine) in zip(grid, product(names, there), strict=True):
        for key, (label, color, style, mark) in SPEEDS.items():
            x, y = _speeds(sizes[name], machine, key, results["budget"])
            options: dict[str, Any] = {
                "color": color,
                "linestyle": style,
                "marker": mark,
                "markersize": 4,
            }
            axes.plot(x, y, label=label, **options)
        axes.set_title(f"{_short(name)}; {machine}", fontsize="small")
        axes.set_ylim(bottom=0)
        axes.set(xlabel="batch", ylabel="images/s")
    return _legend(figure, grid)


def _speeds(sizes: Results, machine: str, key: str, budget: int) -> Line:
    """Return batches and images a second; in memory up to where it fits, and a level beyond."""
    x, y = [], []
    for n, found in sizes.items():
        one = found["machines"][machine][key] if "machines" in found else None
        if one is not None and not (key == "bound" and found["peak"] <= budget):
            x.append(int(n))
            y.append(int(n) / (one if isinstance(one, float) else one["seconds"]))
    return x, y


def memory(results: Results) -> Figure | None:
    """Figure 5: memory against the batch, without a schedule and as allocators serve one."""
    names = [name for name, _ in networks(results)]
    if not names:
        return None
    figure, grid = _grid(-(-len(names) // 3), 3, height=2.6)
    for axes, (name, sizes) in zip(grid, networks(results), strict=False):
        every = {int(n): found["peak"] / GIB for n, found in sizes.items()}
        axes.plot(list(every), list(every.values()), ":k", marker=".", label="without a schedule")
        for allocator, (color, mark) in KINDS.items():
            found = {
                n: one["budgets"]["default"][allocator]
                for n, one in sizes.items()
                if "budgets" in one
            }
            there = {int(n): one["reserved"] / GIB for n, one in found.items() if one}
            options: dict[str, Any] = {"color": color, "marker": mark, "markersize": 4}
            axes.plot(list(there), list(there.values()), label=f"default, {allocator}", **options)
        axes.axhline(results["budget"] / GIB, label="memory", **PHYSICAL)
        axes.set_title(NETWORKS[name].title, fontsize="small")
        axes.set_ylim(0, 2 * results["budget"] / GIB)
        axes.set(xlabel="batch", ylabel="GiB")
    for axes in grid[len(names) :]:
        axes.remove()
    return _legend(figure, grid)


def windows(results: Results) -> Figure | None:
    """The speed of every window of the paper's policy beside the default, which has none."""
    there = machines(results)
    names = [name for name, sizes in networks(results) if _scans(sizes, there[0])]
    if not names:
        return None
    figure, grid = _grid(len(names), len(there), height=2.0)
    sizes = dict(networks(results))
    colors = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
    for axes, (name, machine) in zip(grid, product(names, there), strict=True):
        for color, (n, one) in zip(colors, _scans(sizes[name], machine).items(), strict=False):
            scan = {float(key.split()[2]): seconds for key, seconds in one["windows"].items()}
            relative = [one["default"]["seconds"] / scan[size] for size in sorted(scan)]
            axes.plot(sorted(scan), relative, marker=".", color=color, label=n)
        axes.axhline(1.0, **PHYSICAL)
        axes.legend(fontsize="xx-small", title="batch", title_fontsize="xx-small")
        axes.set_title(f"{_short(name)}; {machine}", fontsize="small")
        axes.set(xlabel="window, GiB", ylabel="speed, default = 1")
    return figure


def _scans(sizes: Results, machine: str) -> Results:
    """Return what was found of each batch in which more than one window does."""
    ones = {n: one["machines"][machine] for n, one in sizes.items() if "machines" in one}
    return {n: one for n, one in ones.items() if len(one.get("windows", {})) > 1}


def _short(name: str) -> str:
    return NETWORKS[name].title.split(",")[0]


def _grid(rows: int, columns: int, *, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(3.1 * columns, height * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in every:
        axes.grid(visible=True, alpha=0.3)
        axes.tick_params(labelsize="small")
    return figure, every


def _legend(figure: Figure, grid: Sequence[Axes]) -> Figure:
    lines, names = grid[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=3, fontsize="small")
    return figure


FIGURES: dict[str, Callable[[Results], Figure | None]] = {
    "figure_3.png": budgets,
    "figure_4.png": speeds,
    "figure_5.png": memory,
    "windows.png": windows,
}


def draw(results: Results, folder: Path) -> list[str]:
    """Draw what the results have figures for, and return the names of the files."""
    drawn = {name: make(results) for name, make in FIGURES.items()}
    for name, figure in drawn.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=75)
    return [name for name, figure in drawn.items() if figure is not None]


def main(*, out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE) -> None:
    """Draw the figures of results.json anew."""
    results = read(out / "results.json")
    if results is None:
        console.print("no results.json there: run `python -m benchmarks.outofcore.schedules.run`")
        raise typer.Exit(1)
    console.print(f"drew {', '.join(draw(results, out))}")


if __name__ == "__main__":
    typer.run(main)
