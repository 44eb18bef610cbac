"""The finders find what brute force says they must, and a real limit really ends a training."""

import ast
import dataclasses
import gc
import json
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from benchmarks.mbs.choice import rows as choice_rows
from benchmarks.mbs.choice.finders import (
    Attempts,
    Found,
    accelerate_decorator,
    halving,
    largest_that_fits,
)
from benchmarks.mbs.choice.lightning_finder import lightning_finder
from benchmarks.mbs.choice.meter import Meter, out_of_memory
from benchmarks.mbs.choice.problems import PROBLEMS
from benchmarks.mbs.choice.registry import FINDERS, PEERS, missing
from benchmarks.mbs.choice.run import one_mode, row
from benchmarks.mbs.choice.sweep import Sweep, grid, peak, relative, sweep
from benchmarks.mbs.loops import by_hand
from benchmarks.mbs.models import MLP
from benchmarks.mbs.problem import Problem, term
from benchmarks.mbs.real_limit import rows as limit_rows
from benchmarks.mbs.real_limit.compare import DOUBLE, compare, distance
from benchmarks.mbs.real_limit.limited import PLAIN, limited
from benchmarks.mbs.real_limit.run import QUICK, cells
from benchmarks.mbs.real_limit.training import Run, Trained, mini_batches
from tests.frozen import freeze
from torch import Tensor, nn
from torch.nn import functional

FOLDERS = [
    Path(__file__).parents[2] / "benchmarks" / "mbs" / name for name in ("choice", "real_limit")
]
BATCH = 12


def mlp(batch: int = BATCH) -> Problem:
    """Few parameters and wide activations, so that the peak grows with the micro-batch."""
    sums = term(lambda o, t: functional.cross_entropy(o, t, reduction="sum"))
    inputs, targets = torch.randn(batch, 3, 16, 8), torch.randint(8, (batch,))
    model = nn.Sequential(MLP(8, 8, 8), nn.Flatten(), nn.Linear(384, 8, bias=False))
    return Problem(model, nn.CrossEntropyLoss(), None, inputs, targets, batch, (sums,))


@pytest.fixture(scope="module")
def peaks() -> dict[int, int]:
    """The truth by brute force: the peak of every size."""
    return {size: peak(mlp(), size) for size in range(1, BATCH + 1)}


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.fixture(scope="module")
def _quick_collection() -> None:
    """The peers collect garbage at every attempt: let them not walk all that is loaded."""
    for package in filter(find_spec, ("lightning", "accelerate")):
        import_module("lightning.pytorch" if package == "lightning" else package)
    freeze()


def test_live_bytes_are_what_lives_at_once() -> None:
    problem = mlp()
    meter = Meter(problem)
    base = meter.live
    assert base == sum(p.numel() * 4 for p in problem.model.parameters())
    with meter:
        first = torch.ones(100)
        second = first + 1
        view = second[::2]
        del first, second
        third = view + 1
        in_batch = problem.inputs[1:]
    assert meter.peak - base == 800
    assert meter.live - base == 400 + third.numel() * 4
    assert in_batch.numel()


def test_gradients_that_are_there_count() -> None:
    problem = mlp()
    bare = Meter(problem).live
    problem.loss_fn(problem.model(problem.inputs), problem.targets).backward()
    assert Meter(problem).live == 2 * bare


def test_past_the_budget_a_full_machine_speaks_and_everything_is_released() -> None:
    problem = mlp()
    meter = Meter(problem, peak(problem, BATCH) - 1)
    base, message = meter.live, "can't allocate memory: .* bytes are live, the budget is"
    with pytest.raises(RuntimeError, match=message) as raised, meter:
        by_hand(problem, BATCH)
    assert out_of_memory(raised.value)
    problem.model.zero_grad(set_to_none=True)
    del raised
    gc.collect()
    assert meter.live == base


@pytest.mark.skipif(bool(missing()), reason=f"not installed: {missing()}")
def test_the_peers_know_the_error() -> None:
    from accelerate.utils.memory import should_reduce_batch_size
    from lightning.pytorch.utilities.memory import is_oom_error

    with pytest.raises(RuntimeError, match="budget is 1") as raised:
        Meter(mlp(), 1)
    assert should_reduce_batch_size(raised.value)
    assert is_oom_error(raised.value)


def test_two_micro_batches_hold_as_much_as_the_full_step(peaks: dict[int, int]) -> None:
    for size, want in peaks.items():
        assert Attempts(mlp(), want).fits(size)
        assert not Attempts(mlp(), want - 1).fits(size)


def test_an_error_of_another_sort_does_not_count_as_memory() -> None:
    def broken(*_: Tensor) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    problem = dataclasses.replace(mlp(), loss_fn=broken, terms=())
    finders: list[Callable[[Problem, int], Found]] = [largest_that_fits, halving]
    for find in finders:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            find(problem, 1 << 30)


def truth(name: str, peaks: dict[int, int], budget: int) -> int | None:
    """What a finder must find, from the peaks of all sizes."""
    fitting = [size for size, bytes_ in peaks.items() if bytes_ <= budget]
    if name == "largest_that_fits":
        return max(fitting, default=None)
    if name == "lightning_power":
        return max((size for size in (1, 2, 4, 8) if size in fitting), default=None)
    if name == "lightning_binsearch":  # its margin is 5 %
        return max(1, int(max(fitting) * 0.95)) if fitting else 1
    size = BATCH
    while size and size not in fitting:
        size = size // 2 if name == "halving" else int(size * 0.9)
    return size or None


@pytest.mark.usefixtures("_quick_collection")
@pytest.mark.parametrize("name", FINDERS)
def test_a_finder_finds_what_brute_force_says(name: str, peaks: dict[int, int]) -> None:
    if name in PEERS:
        needs(PEERS[name])
    for size in (0, 3, 9):  # the largest that fits; 0 is none
        budget = peaks[size] if size else peaks[1] - 1
        found = FINDERS[name](mlp(), budget)
        assert found.size == truth(name, peaks, budget), (name, size)
        for tried, spent, outcome in found.tried:
            if outcome != "first fits":
                assert outcome == ("fits" if peaks[tried] <= budget else "out of memory")
            assert spent > 0
        assert found.size is not None or found.note


def test_the_largest_is_found_where_smaller_sizes_do_not_fit(peaks: dict[int, int]) -> None:
    assert peaks[BATCH // 2] > peaks[BATCH // 2 + 1]  # the tail has the gradients beside it
    for size, budget in peaks.items():
        assert largest_that_fits(mlp(), budget).size == truth("largest_that_fits", peaks, budget)
        assert largest_that_fits(mlp(), budget - 1).size != size


def test_the_full_batch_is_found_where_it_fits(peaks: dict[int, int]) -> None:
    for find in (largest_that_fits, halving):
        found = find(mlp(), max(peaks.values()))
        assert (found.size, {size for size, *_ in found.tried}) == (BATCH, {BATCH})


@pytest.mark.usefixtures("_quick_collection")
def test_the_peers_find_the_full_batch_too(peaks: dict[int, int]) -> None:
    needs("lightning")
    needs("accelerate")
    budget = max(peaks.values())
    assert accelerate_decorator(mlp(), budget).size == BATCH
    found = lightning_finder(mlp(), budget, mode="power")
    assert (found.size, found.note) == (BATCH, "")
    assert max(size for size, *_ in found.tried) == BATCH  # of its 16 the batch has these


def test_a_grid_has_powers_of_two_their_triples_and_the_cap() -> None:
    assert grid(1) == [1]
    assert grid(13) == [1, 2, 3, 4, 6, 8, 12, 13]
    assert grid(96) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]


def test_a_sweep_returns_every_size_in_every_round() -> None:
    found = sweep(mlp(), [5, 1, 3, 3], rounds=3)
    for times in (found.wall, found.processor):
        assert list(times) == [1, 3, 5]
        assert all(len(rounds) == 3 for rounds in times.values())


def test_what_slows_a_full_round_cancels() -> None:
    steady = {1: [4.0, 4.0, 4.0], 2: [2.0, 2.0, 2.0], 3: [1.0, 1.0, 1.0]}
    drifting = {size: [a, 3 * b, 9 * c] for size, (a, b, c) in steady.items()}
    assert relative(drifting) == relative(steady) == {1: 2.0, 2: 1.0, 3: 0.5}


def test_a_row_knows_what_was_better_what_failed_and_what_is_over() -> None:
    times = {1: [4.0, 4.0], 2: [1.0, 1.0], 3: [2.0, 2.0], 4: [0.5, 0.5]}
    swept, bytes_ = Sweep(times, times), {1: 10, 2: 20, 3: 30, 4: 40}
    found = Found(3, [(4, 0.1, "out of memory"), (3, 0.1, "fits")])
    cell = row(found, 1.0, swept, bytes_, budget=30)
    assert (cell["share"], cell["missed"], cell["failed"], cell["over"]) == (0.5, [2], 1, False)
    assert cell["share_processor"] == 0.5
    assert row(found, 1.0, swept, bytes_, budget=20)["over"]
    assert row(found, 1.0, swept, bytes_, budget=5)["share"] is None
    assert "share" not in row(Found(None), 1.0, swept, bytes_, budget=30)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_is_as_large_as_requested(name: str) -> None:
    problem = PROBLEMS[name](3)
    assert len(problem.inputs) == len(problem.targets) == problem.batch == 3
    assert peak(problem, 1) < peak(problem, 3)


def test_the_tables_of_the_choice_are_written_from_one_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "benchmarks.mbs.choice.run.FINDERS", {"largest_that_fits": largest_that_fits}
    )
    ran = one_mode("cpu", ["transformer"], rounds=2, threads=1, batch=6)
    results = json.loads(json.dumps({"modes": {"default": ran}}))
    budgets = results["modes"]["default"]["problems"]["transformer"]["budgets"]
    for budget in budgets.values():
        cell = budget["finders"]["largest_that_fits"]
        assert cell["size"] == budget["largest"]
    for table in (choice_rows.choice, choice_rows.choice_summary, choice_rows.choice_sweep):
        assert table(results).startswith("|")
    assert "largest that fits" in choice_rows.choice_summary(results)


def test_a_step_over_its_budget_reaches_nothing() -> None:
    cell = {
        "size": 4,
        "over": True,
        "share": 1.0,
        "share_processor": 1.0,
        "failed": 0,
        "seconds": 1.0,
        "missed": [],
    }
    budget = {"finders": {"halving": cell | {"tried": [], "search_seconds": 0.1}}}
    ran = {"problems": {"mlp": {"budgets": {"0.5": budget}, "sweep": {}}}}
    results = {"modes": {"default": ran}}
    assert "0, 0 of 1 | 0.00, 0.00 | 0 | 1" in choice_rows.choice_summary(results)
    assert "4 (over budget)" in choice_rows.choice(results)


@pytest.mark.large(of="a limit, for real", few=1)
def test_a_limited_child_really_dies_and_an_unlimited_one_finishes(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    free = limited(PLAIN, QUICK, None, weights=weights)
    assert (free.outcome, free.error, len(free.losses)) == ("finished", "", QUICK.steps)
    loaded = Trained(free.losses, torch.load(weights, weights_only=True))
    assert loaded.digest() == free.digest
    again = limited(PLAIN, QUICK, 256 << 20)  # a limit with room changes nothing
    assert (again.outcome, again.digest, again.losses) == ("finished", free.digest, free.losses)
    weights.unlink()
    dead = limited(PLAIN, QUICK, 8 << 20, weights=weights)
    assert (dead.outcome, dead.losses, dead.digest) == ("died", [], "")
    assert "allocate memory" in dead.error or "could not create" in dead.error
    assert not weights.exists()
    trainings = {"free": cells(free, None), "limited": cells(dead, 8 << 20)}
    table = limit_rows.real_limit({"modes": {"default": {"trainings": trainings}}})
    assert "finished" in table
    assert "died: RuntimeError" in table


def test_a_child_that_breaks_says_how() -> None:
    ended = limited("benchmarks.mbs.real_limit.plain:nobody", QUICK, None)
    assert ended.outcome == "died"
    assert ended.error.startswith("exit status 1: AttributeError")


def test_another_order_holds_the_same_rows_in_every_mini_batch() -> None:
    plain, other = (mini_batches(Run(batch=32, steps=2, order=order)) for order in (0, 1))
    for (a, targets), (b, shuffled) in zip(plain, other, strict=True):
        assert a.shape == (32, 3, 32, 32)
        assert not torch.equal(a, b)
        assert torch.equal(targets.sort().values, shuffled.sort().values)
        keys = [sorted(map(bytes, x.flatten(1).numpy())) for x in (a, b)]
        assert keys[0] == keys[1]


def trained(scale: float, dtype: torch.dtype = torch.float64) -> Trained:
    weights = torch.arange(1, 5, dtype=dtype)
    return Trained([2.0, 1.0 * scale], {"w": weights * scale, "b": torch.ones(2, dtype=dtype)})


def test_float64_trainings_are_the_same_to_1e_9() -> None:
    assert compare(trained(1), trained(1)).distance == 0
    assert compare(trained(1 + 1e-10), trained(1)).same
    found = compare(trained(1 + 1e-8), trained(1))
    assert (found.same, found.allowed) == (False, DOUBLE)
    assert not compare(trained(float("nan")), trained(1)).same


def test_float32_trainings_are_as_near_as_other_orders_of_rows() -> None:
    undivided, order = (trained(scale, torch.float32) for scale in (1, 1 + 1e-5))
    assert compare(trained(1 + 5e-6, torch.float32), undivided, [order]).same
    assert not compare(trained(1 + 1e-4, torch.float32), undivided, [order]).same
    with pytest.raises(ValueError, match=r"another order; got none: pass `orders`"):
        compare(undivided, undivided)


def test_trainings_of_other_lengths_are_not_compared() -> None:
    short = Trained([2.0], trained(1).weights)
    with pytest.raises(ValueError, match=r"got 1 and 2 steps, 2 and 2 weights: train both"):
        distance(short, trained(1))
    table = limit_rows.real_limit_compared(
        {
            "comparisons": {
                "float64": {
                    "a": {"died": "x"},
                    "b": {"distance": 0.0, "allowed": 1e-9, "same": True},
                }
            }
        }
    )
    assert "| a, float64 | died | - | no |" in table
    assert "| b, float64 | 0.0e+00 | 1.0e-09 | yes |" in table


def test_the_baselines_do_not_know_what_they_judge() -> None:
    for path in (path for folder in FOLDERS for path in folder.glob("*.py")):
        if path.name == "ours.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", [])]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "anybatch" for name in names), path.name
