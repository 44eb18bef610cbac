"""From results files to prose: one function per table, and the README beside each results file.

Nothing is typed twice: README, docs and the pages of the benchmarks are filled from `TABLES`,
and a table whose command has not been run says so instead of showing old figures.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.mbs.training_rows import HEAD, epoch_rows, summary_row
from benchmarks.results import HERE, console, read

LIES = HERE.parent / "docs" / "lies"
PAGE = HERE.parent / "docs" / "five_lies.md"
LOOPS = ("anybatch", "by_hand", "naive", "mbp", "accelerate", "fabric")
SHOWN = {
    "by_hand": "by hand",
    "mbp": "mbp-pytorch",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "naive_float32": "naive, grad_dtype float32",
    "anybatch_float32": "anybatch, grad_dtype float32",
}
METRICS = ("relative", "law1")
TRAINED = ("demo", "cifar", "membrane")
Row = list[str]
Results = dict[str, Any]


def markdown(head: Row, rows: list[Row]) -> str:
    """A markdown table; the first column is text, the others are figures."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, rule, *rows])


def shown(name: str) -> str:
    """The name of a loop as a reader knows it."""
    return SHOWN.get(name, name)


def figure(error: float | str) -> str:
    """An error with two digits, or the words of a results file."""
    return error if isinstance(error, str) else f"{error:.1e}"


def worst(errors: Results) -> float | str:
    """The worst over splits; words (`not finite`) are worse than any number."""
    words = [error for error in errors.values() if isinstance(error, str)]
    found: float | str = words[0] if words else max(errors.values())
    return found


def _ran(results: Results) -> list[str]:
    return [loop for loop in LOOPS if loop not in results["missing"]]


def exactness(results: Results) -> str:
    """The worst error of every case over its splits, by loop."""
    loops = _ran(results)
    rows = [
        [name, *(figure(worst(case[loop])) for loop in loops)]
        for name, case in results["cases"].items()
    ]
    return markdown(["loss and model", *map(shown, loops)], rows)


def exactness_summary(results: Results) -> str:
    """How many cases each loop gets right, on all splits and on the even one, and its errors."""
    cases, rows = results["cases"].values(), []
    for loop in _ran(results):
        errors = [worst(case[loop]) for case in cases]
        finite = [error for error in errors if not isinstance(error, str)]
        exact = [case["exact"][loop] for case in cases]
        counts = [sum(all(one.values()) for one in exact), sum(one["even"] for one in exact)]
        cells = [f"{count} of {len(errors)}" for count in counts]
        cells += [figure(median(finite)), figure(max(finite)), str(len(errors) - len(finite))]
        rows.append([shown(loop), *cells])
    head = ["exact on every split", "on the even split", "median error", "worst", "NaN in"]
    return markdown(["loop", *head], rows)


def speed(results: Results) -> str:
    """time(by hand) / time(loop): the wall's median (and quartiles), the processor's median."""
    rows, modes = [], results["modes"]
    for step in results["sizes"]:
        for loop in next(iter(modes.values()))["steps"][step]:
            cells = [modes[mode]["steps"][step][loop] for mode in modes]
            middles = [
                f"{cell['ratio']:.3f} ({cell['ratio_low']:.3f}-{cell['ratio_high']:.3f}), "
                f"{cell['ratio_processor']:.3f}"
                for cell in cells
            ]
            rows.append([f"{step}: {shown(loop)}", *middles])
    return markdown(["step: loop", *(f"malloc {mode}" for mode in modes)], rows)


def speed_summary(results: Results) -> str:
    """The engine's median paired ratio for each step and malloc mode: wall, processor."""
    modes, rows = results["modes"], []
    for step in results["sizes"]:
        cells = [modes[mode]["steps"][step]["anybatch"] for mode in modes]
        rows.append([step, *(f"{c['ratio']:.3f}, {c['ratio_processor']:.3f}" for c in cells)])
    return markdown(["step", *(f"malloc {mode}: wall, processor" for mode in modes)], rows)


def bf16(results: Results) -> str:
    """The worst relative error of each variant over its AdamW steps."""
    rows = [
        [shown(name), f"loss in {loss}", row["dtype"], *(figure(max(row[m])) for m in METRICS)]
        for loss, variants in results["losses"].items()
        for name, row in variants.items()
    ]
    return markdown(["loop", "loss", "gradients in", "relative error", "Law 1's metric"], rows)


def algorithm1(results: Results) -> str:
    """Loss.algorithm1 against the paper's formula (worst) and against the batch, by split."""
    rows = []
    for name, case in results["cases"].items():
        formula = worst({split: cell["to_formula"] for split, cell in case.items()})
        rows.append([name, figure(formula), *(figure(cell["to_batch"]) for cell in case.values())])
    splits = list(next(iter(results["cases"].values())))
    return markdown(["case", "to the formula", *(f"to the batch, {s}" for s in splits)], rows)


def lies(results: Results) -> str:
    """What the five scripts print: the error of the naive loop and of anybatch."""
    rows = [
        [name[2:], *(line.split()[-1] for line in text.splitlines())]
        for name, text in results["scripts"].items()
    ]
    return markdown(["lie", "naive", "anybatch"], rows)


def lie(name: str) -> Callable[[Results], str]:
    """One script of docs/lies, word for word, and what it printed."""

    def page(results: Results) -> str:
        script = (LIES / f"{name}.py").read_text().rstrip()
        return f"```python\n{script}\n```\n\n```text\n{results['scripts'][name].rstrip()}\n```"

    return page


def training(results: Results) -> str:
    """A recorded training: its row of README's table, its recipe, and its curves as a table."""
    cells = zip(HEAD, summary_row(results), strict=True)
    recipe = ", ".join(f"{name} {value}" for name, value in results["recipe"].items())
    head, *rows = epoch_rows(results)
    lines = "\n".join(f"- {name}: {cell}" for name, cell in cells)
    return "\n\n".join([lines, f"Recipe: {recipe}.", markdown(head, rows)])


def overhead(results: Results) -> str:
    """Milliseconds of each step in forward and backward, and beside them, by hand and engine."""
    rows = []
    for name, step in results["steps"].items():
        hand, ours = step["by_hand"], step["anybatch"]
        kernels = [one["forward"] + one["backward"] for one in (hand, ours)]
        figures = [*kernels, hand["rest"], ours["rest"], ours["rest"] - hand["rest"]]
        rows.append([name, str(step["micro_batches"]), *(f"{value:.2f}" for value in figures)])
    head = ["kernels by hand, ms", "engine", "rest by hand, ms", "engine", "more"]
    return markdown(["step", "micro-batches", *head], rows)


def soak(results: Results) -> str:
    """What the last soak has run, in one line a count."""
    tests = results["outcomes"]
    interrupted = sum(results["counted"].values())
    rows = [
        ["tests passed, failed", f"{tests['passed']}, {tests['failed']}"],
        ["cases and splits against the undivided batch", str(results["exactness"])],
        ["random shapes and splits, each property", str(results["examples"])],
        ["lines at which a step was interrupted by a real signal", str(interrupted)],
    ]
    return markdown(["full counts", "of the last soak"], rows)


def trainings() -> str:
    """One row for each recorded training, or the command that makes it."""
    rows = []
    for name in TRAINED:
        results = read(HERE / WRITERS[name][0] / "results.json")
        empty = [f"*no results yet: run `{command(WRITERS[name][0])}`*"] + [""] * (len(HEAD) - 1)
        rows.append(empty if results is None else summary_row(results))
    return markdown(HEAD, rows)


# The name of a table -> its folder and how it is written.
WRITERS: dict[str, tuple[str, Callable[[Results], str]]] = {
    "exactness": ("mbs/exactness", exactness),
    "exactness_summary": ("mbs/exactness", exactness_summary),
    "speed": ("mbs/speed", speed),
    "speed_summary": ("mbs/speed", speed_summary),
    "bf16": ("mbs/bf16", bf16),
    "algorithm1": ("mbs/algorithm1", algorithm1),
    "lies": ("mbs/lies", lies),
    "overhead": ("mbs/overhead", overhead),
    "soak": ("mbs/soak", soak),
    **{name: (f"mbs/{name}", training) for name in TRAINED},
    **{path.stem: ("mbs/lies", lie(path.stem)) for path in sorted(LIES.glob("[0-9]_*.py"))},
}
TITLES = {
    "exactness": "Error of the gradient, every case and loop",
    "speed": "Speed against the best loop by hand",
    "overhead": "What a step costs beside forward and backward",
    "bf16": "2048 micro-batches in bfloat16",
    "algorithm1": "The paper's Algorithm 1, word for word",
    "lies": "Five ways accumulation lies",
    "demo": "Digits: what `make demo` trains",
    "cifar": "CIFAR-10 images: a training with its curves",
    "membrane": "Membrane images: a training with its curves",
}
OPTIONS = {
    "mbs/demo": " --out benchmarks/mbs/demo",
    "mbs/cifar": " --data DIR",
    "mbs/membrane": " --data DIR",
}


def command(folder: str) -> str:
    """The command that makes the results of a folder."""
    if folder == "mbs/soak":
        return "make soak"
    return f"python -m benchmarks.{folder.replace('/', '.')}.run{OPTIONS.get(folder, '')}"


def table(name: str) -> str:
    """The markdown of one table, or one line that names the command to run first."""
    folder, write = WRITERS[name]
    results = read(HERE / folder / "results.json")
    if results is None:
        return f"*No results yet: run `{command(folder)}`.*"
    return write(results)


TABLES: dict[str, Callable[[], str]] = {name: partial(table, name) for name in WRITERS}
TABLES["trainings"] = trainings


def fill(text: str) -> str:
    """Replace what stands between `<!-- generated: NAME -->` and `<!-- end -->`."""

    def region(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- generated: {name} -->\n{TABLES[name]() if name in TABLES else found[2]}\n"

    pattern = r"<!-- generated: (\S+) -->\n(.*?)\n?(?=<!-- end -->)"
    return re.sub(pattern, region, text, flags=re.DOTALL)


def environment(results: Results) -> str:
    """The environment of a results file as a list, then its seeds and sizes.

    The malloc modes of one file share everything else, and are said in the table's head.
    """
    modes = list(results.get("modes", {}).values())
    found = dict(modes[0]["environment"] if modes else results["environment"])
    if modes:
        del found["malloc"]
    found |= {key: results[key] for key in ("seed", "seeds", "pairs") if key in results}
    lines = [f"- {key}: {value}" for key, value in found.items()]
    for key, value in results.get("sizes", {}).items():
        sizes = value.items() if isinstance(value, dict) else [("", value)]
        lines.append(f"- {key}: {', '.join(f'{name} {size}'.strip() for name, size in sizes)}")
    return "\n".join(lines)


def readme(name: str) -> str:
    """The page beside a results file: Result, Environment, Reproduce."""
    folder, _ = WRITERS[name]
    results = read(HERE / folder / "results.json")
    parts = [f"# {TITLES[name]}", "Written by `python -m benchmarks.report`; do not edit."]
    run = (HERE / folder / "run.py").read_text().split('"""')[1].strip()
    summary = f"{name}_summary"
    parts += [run, "## Result", *([table(summary)] if summary in WRITERS else []), table(name)]
    if (HERE / folder / "curves.png").exists():
        parts.append("![learning curves](curves.png)")
    if results is not None:
        parts += ["## Environment", environment(results)]
    return "\n\n".join([*parts, "## Reproduce", f"```bash\n{command(folder)}\n```"]) + "\n"


def main() -> None:
    """Write the page of every table and the page of the five lies."""
    for name in TITLES:
        path = HERE / WRITERS[name][0] / "README.md"
        path.write_text(readme(name))
    PAGE.write_text(fill(PAGE.read_text()))
    console.print(f"wrote {len(TITLES)} pages and {Path(PAGE).name}")


if __name__ == "__main__":
    main()
