"""The loops agree with the whole batch where they must, and every benchmark runs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from benchmarks import report, tables
from benchmarks.all import modules
from benchmarks.mbs import rows
from benchmarks.mbs.algorithm1 import run as algorithm1
from benchmarks.mbs.bf16 import run as bf16
from benchmarks.mbs.cases import BATCH, CASES, Case, splits
from benchmarks.mbs.exactness.run import permuted
from benchmarks.mbs.loops import LOOPS, PEERS, by_hand, naive, undivided
from benchmarks.mbs.measure import gradients, worst
from benchmarks.mbs.speed.run import summary

from anybatch.tools.exactness import error_of, tolerance

ROOT = Path(__file__).parents[2]
BY_NAME = {case.name: case for case in CASES}
QUICK = ("exactness", "bf16", "algorithm1", "lies", "overhead")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_catalogue_is_large_and_its_names_are_one_each() -> None:
    assert len(CASES) >= 60
    assert len(BY_NAME) == len(CASES)


def test_splits_are_even_ragged_single_and_larger() -> None:
    assert splits(10) == {"even": 5, "ragged": 4, "one": 1, "larger": 13}
    assert splits(3) == {"even": 1, "ragged": 2, "one": 1, "larger": 6}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_by_hand_gives_the_gradient_of_the_full_batch(case: Case) -> None:
    problem = case.make(1)
    want = gradients(undivided, problem, BATCH)
    noise = error_of(gradients(undivided, permuted(problem, 1), BATCH)[0], want[0])
    for size in splits(BATCH).values():
        assert worst(gradients(by_hand, problem, size), want) <= tolerance(noise)


def test_a_case_is_the_same_for_the_same_seed_and_does_not_touch_the_generator() -> None:
    before = torch.get_rng_state()
    first, second = (CASES[0].make(3) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert not torch.equal(first.inputs, CASES[0].make(4).inputs)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("loop", ["naive", *PEERS])
@pytest.mark.parametrize("name", ["cross_entropy-mlp", "info_nce-two_encoders"])
def test_a_loop_that_divides_by_micro_batches_is_the_naive_one(loop: str, name: str) -> None:
    if loop in PEERS and find_spec(PEERS[loop]) is None:
        pytest.skip(f"{PEERS[loop]} is not installed")
    problem = BY_NAME[name].make(1)
    for size in (4, BATCH + 3):
        want = gradients(naive, problem, size)
        assert worst(gradients(LOOPS[loop], problem, size), want) <= tolerance()


def test_naive_is_exact_on_even_plain_means_and_wrong_on_ragged_ones() -> None:
    problem = BY_NAME["cross_entropy-mlp"].make(1)
    want = gradients(undivided, problem, BATCH)
    assert worst(gradients(naive, problem, 5), want) <= tolerance()
    assert worst(gradients(naive, problem, 4), want) > 0.01


def test_a_micro_batch_of_ignored_targets_is_not_finite_for_the_naive_loop() -> None:
    problem = BY_NAME["all_ignored-mlp"].make(1)
    want = gradients(undivided, problem, BATCH)
    assert worst(gradients(naive, problem, 4), want) == float("inf")


@pytest.mark.large(few=1)
@pytest.mark.parametrize("loss", bf16.LOSSES)
def test_2048_bfloat16_micro_batches_keep_their_gradient_in_float32(loss: str) -> None:
    found = {
        name: bf16.variant(*bf16.VARIANTS[name], bf16.LOSSES[loss], bf16.BATCH, 1)
        for name in ("naive", "undivided", "anybatch", "anybatch_float32")
    }
    errors = {name: row["relative"][0] for name, row in found.items()}
    assert errors["anybatch_float32"] <= 5e-4
    assert errors["anybatch"] <= max(errors["undivided"], 2**-8)  # rounded once
    assert errors["naive"] >= 0.04
    assert all(row["moved"] for row in found.values())
    assert found["anybatch_float32"]["dtype"] == "float32"


def test_algorithm1_is_the_papers_formula_and_wrong_on_ragged_batches() -> None:
    found = algorithm1.one_case(BY_NAME["cross_entropy-mlp"])
    assert max(cell["to_formula"] for cell in found.values()) <= tolerance()
    assert found["even"]["to_batch"] <= tolerance()
    assert found["ragged"]["to_batch"] > 0.1


@pytest.mark.parametrize("table", QUICK)
def test_a_benchmark_runs_quickly_and_its_table_can_be_written(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_module(f"benchmarks.mbs.{table}.run").main(quick=True, out=tmp_path / "mbs" / table)
    results = json.loads((tmp_path / "mbs" / table / "results.json").read_text())
    assert results["environment"]["torch"] == torch.__version__
    monkeypatch.setattr(report, "HERE", tmp_path)
    assert tables.table(table).startswith("|")


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
@pytest.mark.parametrize(
    ("table", "words"),
    [("mbs/speed", "anybatch"), ("agbn/lanes_parts", "all leaves")],
)
def test_a_benchmark_of_seconds_runs_in_both_malloc_modes(
    table: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", f"benchmarks.{table.replace('/', '.')}.run", "--quick"]
    subprocess.run([*command, "--out", tmp_path / table], check=True, cwd=ROOT)
    results = json.loads((tmp_path / table / "results.json").read_text())
    modes = {mode: found["environment"]["malloc"] for mode, found in results["modes"].items()}
    assert modes == {"default": "default", "large": "large"}
    monkeypatch.setattr(report, "HERE", tmp_path)
    monkeypatch.setattr(tables, "HERE", tmp_path)
    assert words in tables.table(table.split("/")[1])


def test_the_paired_ratio_is_the_median_of_ratios_not_the_ratio_of_medians() -> None:
    found = summary([((1.0, 4.0), (1.0, 1.0)), ((2.0, 4.0), (1.0, 1.0)), ((9.0, 9.0), (3.0, 1.0))])
    assert (found["ratio"], found["ratio_processor"]) == (2.0, 4.0)
    assert (found["seconds_by_hand"], found["seconds"]) == (2.0, 1.0)


def test_a_table_without_results_names_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "HERE", tmp_path)
    for name, table in tables.TABLES.items():
        folder = tables.WRITERS[name][0] if name in tables.WRITERS else ""
        made = "python -m tests." if name == "plan" else "python -m benchmarks."
        said = f"run `{tables.MADE.get(folder, made)}"
        assert said in table(), name


def test_words_are_worse_than_numbers() -> None:
    assert rows.worst({"even": 0.1, "one": "not finite"}) == "not finite"
    assert rows.worst({"even": 0.1, "one": 0.2}) == 0.2


def test_only_the_named_regions_are_filled() -> None:
    text = "a\n<!-- generated: nobody -->\nkept\n<!-- end -->\nb\n"
    assert report.fill(text) == text


def test_filling_twice_is_filling_once() -> None:
    text = (ROOT / "docs" / "five_lies.md").read_text()
    assert report.fill(report.fill(text)) == report.fill(text)


@pytest.mark.parametrize("name", tables.TITLES)
def test_the_page_of_a_results_file_is_what_the_file_says(name: str) -> None:
    page = tables.HERE / tables.WRITERS[name][0] / "README.md"
    assert page.read_text() == report.readme(name), "run `python -m benchmarks.report`"


def test_the_page_of_the_lies_holds_the_scripts_and_what_they_printed() -> None:
    text = report.PAGE.read_text()
    assert text == report.fill(text), "run `python -m benchmarks.report`"
    for script in rows.LIES.glob("[0-9]_*.py"):
        assert script.read_text().strip() in text


def test_every_benchmark_is_found() -> None:
    assert {f"benchmarks.mbs.{name}.run" for name in (*QUICK, "speed")} <= set(modules())
