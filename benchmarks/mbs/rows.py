"""The tables of the first paper's benchmarks, each from its results file to markdown."""

from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.mbs.training_rows import HEAD, epoch_rows, summary_row
from benchmarks.results import HERE

LIES = HERE.parent / "docs" / "lies"
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


def own_losses(results: Results) -> str:
    """Milliseconds of a step of each loss by hand, and of both engines as a multiple of it."""
    rows = []
    for name, step in results["steps"].items():
        ratios = (f"{step['of_by_hand'][one]:.2f}" for one in ("one_pass", "two_passes"))
        rows.append([name, str(step["micro_batches"]), f"{step['ms']['by_hand']:.1f}", *ratios])
    head = ["by hand, ms", "engine, of it", "if samples met, of it"]
    return markdown(["loss", "micro-batches", *head], rows)


def soak(results: Results) -> str:
    """What the last soak has run, in one line a count."""
    files = results["files"].values()
    outcomes = [one["outcomes"] for one in files]
    passed, failed = (sum(one[verdict] for one in outcomes) for verdict in ("passed", "failed"))
    failed += sum(one["error"] for one in outcomes)
    counts = Counter[str]()
    for one in files:
        counts.update(one["cases"])
        counts.update(one["counted"])

    def of(*tests: str) -> str:
        return str(sum(n for name, n in counts.items() if any(test in name for test in tests)))

    in_full = f"{len(files)} of {results['of']}"
    drawn = (one["examples"] for name, one in results["files"].items() if "test_timeline" in name)
    examples = str(max(drawn, default=0))
    rows = [
        ["test files that have some, run in full", in_full],
        ["their tests passed, failed", f"{passed}, {failed}"],
        ["cases and splits against the undivided batch", of("gives_the_gradient_of_the_und")],
        ["the same and BatchNorm over real processes", of("test_ranks.py")],
        ["random shapes and splits, each property", examples],
        ["random steps in lanes against the undivided batch", of("random_steps_none_is_wrong")],
        ["draws of dice against those of the undivided batch", of("test_dice.py", "ranks_dice")],
        ["random programs whose saved tensors leave", of("test_random_programs")],
        ["lines at which a step was interrupted by a real signal", of("ctrl_c_at_every_line")],
        ["random moments of steps in lanes, the same", of("ctrl_c_at_a_random_moment")],
        ["faults raised in lanes, and on one rank", of("raised_anywhere", "a_fault_on_one_rank")],
        ["random models, batches and budgets, the fastest size", of("is_ever_over")],
        ["the same, the largest size", of("uses_the_budget")],
        ["random lengths, batch sizes and image sizes under a budget", of("changing_shapes")],
        ["moments at which a run was killed, and resumed bitwise", of("test_kills")],
    ]
    return markdown(["full counts", "of the last soak"], [row for row in rows if row[1] != "0"])
