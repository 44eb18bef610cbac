"""MBS's tables: a cap that is real, a baseline that is the same training, a table that resumes."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from benchmarks.mbs.tables import plain, rows, run
from benchmarks.mbs.tables.data import Prepared, prepare_images, prepare_masks
from benchmarks.mbs.tables.jobs import (
    AMOEBANET,
    BATCHNORM,
    QUICK,
    RESNET_20,
    SMALL,
    TABLES,
    UNDIVIDED_WAYS,
    Job,
    in_micro_batches,
    of_table,
    undivided,
    with_batchnorm,
)
from benchmarks.mbs.tables.limited import is_memory_failure
from benchmarks.mbs.tables.one_run import first_line, job_of
from benchmarks.mbs.tables.schedule import Runs, ended_badly, largest_undivided
from benchmarks.mbs.tables.working import Working, busy_seconds
from benchmarks.mbs.training_rows import CURVES
from PIL import Image
from tests.cli.conftest import save

from anybatch.cli.settings import Settings
from anybatch.cli.train import train

TINY = replace(QUICK, epochs=1, samples=64)
MIB = 2**20


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Dark and bright squares in two classes: 33 training and 9 test images of each."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 33), ("test", 9)):
        for level in (0, 1):
            for index in range(count):
                pixels = draw.integers(0, 90, (32, 32, 3)) + 150 * level
                path = tmp_path / "images" / part / str(level) / f"{index:02}.png"
                save(path, pixels.astype(np.uint8))
    return tmp_path / "images"


@pytest.fixture
def masks(tmp_path: Path) -> Path:
    draw = np.random.default_rng(1)
    for index in range(5):
        mask = np.zeros((32, 32), np.uint8)
        mask[:, : 3 + 5 * index] = 255
        image = draw.integers(0, 80, (32, 32)).astype(np.uint8) + mask // 2
        save(tmp_path / "pairs" / "image" / f"{index}.png", image)
        save(tmp_path / "pairs" / "label" / f"{index}.png", mask)
    return tmp_path / "pairs"


def made_up(job: Job, data: Prepared, out: Path) -> dict[str, Any]:
    """Every undivided mini-batch above the case's guess fails; one model diverges at 64."""
    times = {"from": 10.0 * job.seed, "to": 10.0 * job.seed + 7}
    guess = {case.name: case.initial for case in SMALL.cases}[job.case]
    if job.way in UNDIVIDED_WAYS and job.batch > guess:
        return {"ended": "failed", "error": "RuntimeError: can't allocate memory", **times}
    if job.case == AMOEBANET.name and job.batch == 64:
        return {"ended": "diverged", "error": "TrainingError: the loss", **times}
    curve = [0.5, 0.25 + job.seed / 10]
    return {"ended": "trained", **dict.fromkeys((*CURVES, "seconds"), curve), **times}


def counting(calls: list[Job]) -> Callable[[Job, Prepared, Path], dict[str, Any]]:
    def start(job: Job, data: Prepared, out: Path) -> dict[str, Any]:
        calls.append(job)
        return made_up(job, data, out)

    return start


@pytest.mark.large(of="a limit, for real", few=1)
def test_under_one_cap_the_undivided_batch_fails_and_micro_batches_train(
    images: Path, tmp_path: Path
) -> None:
    data = prepare_images(images, TINY.samples, tmp_path / "links")
    case = replace(RESNET_20, cap=90 * MIB)
    fails = undivided(TINY, case, 64, seed=0)
    trains = in_micro_batches(TINY, case, 64, initial=8, seed=0)
    fits = undivided(TINY, case, 8, seed=0)
    normed, exact = with_batchnorm(TINY, case, 64, 8, seed=0)
    runs = Runs(Working(tmp_path / "runs.jsonl"), {case.name: data}, tmp_path / "runs", 2)
    runs.all([fails, trains, fits, normed, exact])
    found = [runs.working.get(job) for job in (fails, trains, fits)]
    assert [one["ended"] for one in found if one] == ["failed", "trained", "trained"], found
    both = [runs.one(job)["ended"] for job in (normed, exact)]
    assert both == ["failed", "trained"]
    assert (exact.lanes, exact.malloc, normed.lanes) == (8, "mapped", 0)
    assert all(len(one["train_loss"]) == 1 for one in found[1:] if one)
    again = Runs(Working(tmp_path / "runs.jsonl"), {}, tmp_path / "none", 2)
    assert [again.one(job) for job in (fails, trains, fits)] == found


def test_the_baseline_is_the_same_training_but_for_the_step(images: Path) -> None:
    """At a learning rate of 0 the two see the same images with the same weights, or differ."""
    settings = Settings(
        data=str(images), model="resnet20", recipe="mbs-resnet", batch_size=32, micro_batch=32
    )
    settings = replace(settings, epochs=2, lr=0.0, pad=4, device="cpu", out=images.parent / "run")
    begun: list[int] = []
    found = plain.train_undivided(settings, lambda: begun.append(1))
    train(settings)
    text = (images.parent / "run" / "metrics.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if line["kind"] == "epoch"]
    for part in ("train", "test"):
        figures = [line[f"{part}_accuracy"] for line in lines]
        assert [row[f"{part}_metric"] for row in found] == figures
    assert begun == [1]


def test_the_baseline_learns_without_the_engine(images: Path) -> None:
    settings = Settings(data=str(images), model="resnet20", batch_size=16, device="cpu", epochs=3)
    found = plain.train_undivided(settings, lambda: None)
    assert found[-1]["train_loss"] < found[0]["train_loss"]
    assert "Engine" not in inspect.getsource(plain)


def test_a_stopped_table_goes_on_where_it_stopped(tmp_path: Path) -> None:
    jobs = [undivided(TINY, RESNET_20, batch, seed) for batch in (8, 16) for seed in (0, 1)]
    path, calls, data = tmp_path / "at" / "runs.jsonl", [], {RESNET_20.name: Prepared(tmp_path)}
    Runs(Working(path), data, tmp_path, 2, counting(calls)).all([*jobs[:2], *jobs[:2]])
    assert sorted(map(str, calls)) == sorted(map(str, jobs[:2]))
    path.write_text(path.read_text()[:-20])  # stopped in the middle of the second line
    Runs(Working(path), data, tmp_path, 1, counting(calls)).all(jobs)
    assert len(calls) == 2 + 3
    Runs(Working(path), data, tmp_path, 2, counting(calls)).all(jobs)
    assert len(calls) == 5
    changed = replace(jobs[0], epochs=5)
    assert Working(path).get(jobs[0]) == made_up(jobs[0], data[RESNET_20.name], path)
    assert Working(path).get(changed) is None


def test_an_error_of_one_training_stops_the_table_and_keeps_the_others(tmp_path: Path) -> None:
    jobs = [undivided(TINY, RESNET_20, batch, 0) for batch in (8, 16, 32, 64)]

    def start(job: Job, data: Prepared, out: Path) -> dict[str, Any]:
        if job.batch == 16:
            raise RuntimeError("broken")
        return made_up(job, data, out)

    working = Working(tmp_path / "runs.jsonl")
    data = {RESNET_20.name: Prepared(tmp_path)}
    with pytest.raises(RuntimeError, match="broken"):
        Runs(working, data, tmp_path, 1, start).all(jobs)
    assert Working(working.path).get(jobs[0]) is not None
    assert Working(working.path).get(jobs[1]) is None


@pytest.mark.parametrize("limit", range(0, 40, 3))
def test_the_search_finds_the_largest_power_of_two(limit: int) -> None:
    requested: list[int] = []

    def one(job: Job) -> dict[str, Any]:
        requested.append(job.batch)
        return {"ended": "trained" if job.batch <= limit else "failed"}

    fitting = [2**k for k in range(11) if 2**k <= limit]
    preset = replace(SMALL, largest=16)
    found = largest_undivided(preset, replace(RESNET_20, initial=8), one)
    assert found == max((size for size in fitting if size <= 16), default=None)
    assert len(set(requested)) == len(requested)


def test_busy_seconds_count_every_second_once() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        starts = draw.integers(0, 40, 6)
        spans = [(int(a), int(a + b)) for a, b in zip(starts, draw.integers(0, 9, 6), strict=True)]
        ticks = {tick for a, b in spans for tick in range(a, b)}
        assert busy_seconds({"from": a, "to": b} for a, b in spans) == len(ticks)
    assert busy_seconds([]) == 0


def test_tables_that_need_the_same_training_name_the_same_job() -> None:
    initial = {case.name: case.initial for case in SMALL.cases}
    jobs = {name: of_table(name, SMALL, initial) for name in TABLES}
    assert set(jobs["table3"]) < set(jobs["table5"])
    assert set(jobs["figure3"]) < set(jobs["table4"])
    assert jobs["table2"] == []
    assert {job.batch for job in jobs["table5"]} == {16, 32, 64, 128, 256, 512, 1024}
    micro = {(job.batch, job.micro) for job in jobs["table5"] if job.way == "micro"}
    assert micro == {(16, 8), *((2**k, 16) for k in range(5, 11))}
    assert {job.look.pixels for job in jobs["table1"]} == {16, 32, 64}


def test_a_job_survives_its_way_to_a_process() -> None:
    for job in (undivided(SMALL, case, 16, 1) for case in SMALL.cases):
        line = json.dumps(job, default=vars)
        assert job_of(json.loads(line)) == job


def test_all_tables_are_written_from_what_was_run(
    images: Path, masks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Job] = []
    monkeypatch.setattr(run, "Runs", functools.partial(Runs, start=counting(calls)))
    monkeypatch.setattr(run, "SMALL", replace(SMALL, largest=64))
    again = functools.partial(
        run.main, images=images, membrane=masks, folder=tmp_path, out=tmp_path / "out"
    )
    again(only="table2")
    first = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(first["table_seconds"]) == ["table2"]
    again()
    assert len(set(calls)) == len(calls)
    count = len(calls)
    again()
    assert len(calls) == count
    text = (tmp_path / "out" / "results.json").read_text()
    assert not re.search(r'"[^"]*/[^"]*/', text), "a path"
    results = json.loads(text)
    assert set(results["table_seconds"]) == set(TABLES) - {BATCHNORM}
    assert results["table_seconds"]["table4"] == 21
    table = rows.table4(results)
    last = "Failed | 35.00 ± 10.00 | Failed | 0.38 |"
    assert f"| ResNet-20 | 32 | 16 | Failed | 50.00 ± 0.00 | {last} Failed | 86.51 ± 2.14" in table
    assert f"| {AMOEBANET.name} | 64 | 32 | Failed | diverged | Failed | diverged |" in table
    assert table.count("\n| ResNet-20 |") == 3
    assert "| ResNet-20 | 82 MiB | 16 | 8 | RuntimeError: can't allocate memory | 16 | 8 |" in (
        rows.table2(results)
    )
    assert "95.48 ± 0.13 | 95.45 ± 0.26 |" in rows.table3(results)
    assert rows.table1(results).count("\n") == 1 + 8
    assert rows.tables(results).count("### Table") == 5
    with Image.open(tmp_path / "out" / "curves.png") as picture:
        assert picture.height > picture.width


def test_the_columns_with_batchnorm_are_added_to_tables_that_were_run_elsewhere(
    images: Path, masks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Job] = []
    monkeypatch.setattr(run, "Runs", functools.partial(Runs, start=counting(calls)))
    monkeypatch.setattr(run, "SMALL", replace(SMALL, largest=64))
    again = functools.partial(run.main, images=images, membrane=masks, out=tmp_path / "out")
    path = tmp_path / "out" / "results.json"
    names = "table1,table2,table3,table4,table5,figure3"
    again(only=names, folder=tmp_path / "elsewhere")
    before = json.loads(path.read_text())
    assert "not run" in rows.table3(before)
    calls.clear()
    add = functools.partial(again, only="batchnorm", folder=tmp_path / "here")
    add(batches="16,64", models="resnet20", seeds=2)
    assert {(job.model, job.batch, job.seed, job.way) for job in calls} == {
        ("resnet20", batch, seed, way)
        for batch in (16, 64)
        for seed in (0, 1)
        for way in ("norm", "exact")
    }
    found = json.loads(path.read_text())
    assert found["table_seconds"] == before["table_seconds"]
    assert "The 8 trainings with BatchNorm took 1 minutes, the sum" in rows.tables(found)
    assert found["runs"][: len(before["runs"])] == before["runs"]
    table = rows.table4(found).splitlines()
    cells = {line.split(" | ")[1]: line.split(" | ")[13:] for line in table if "ResNet-20" in line}
    figure = "50.00 ± 0.00 (2 epochs, 2 of 3 seeds)"
    assert cells["16"][:2] == [figure, figure]
    assert cells["32"][:2] == ["not run", "not run"]
    assert cells["64"][:2] == ["Failed (2 of 3 seeds)", figure]
    count = len(calls)
    add(batches="16", models="resnet20,unet", seeds=1, epochs=1)
    assert len(calls) == count + 4  # of both models: other epochs are other trainings
    assert {job.epochs for job in calls[count:]} == {1}
    later = json.loads(path.read_text())["runs"]
    assert len(later) == len(found["runs"]) + 2  # U-Net's; the others take their places
    with pytest.raises(typer.BadParameter, match="must have the size of the tables"):
        add(quick=True)


def test_a_cell_says_how_many_seeds_failed() -> None:
    ran = {"ended": "trained", "test_metric": [0.2, 0.6, 0.5]}
    assert rows.cell([ran, ran], rows.best) == "60.00 ± 0.00"
    assert rows.cell([ran], rows.last) == "50.00"
    assert rows.cell([ran, {"ended": "failed"}], rows.best) == "60.00, Failed 1 of 2"
    assert rows.cell([{"ended": "diverged"}] * 3, rows.best) == "diverged"
    assert rows.cell([], rows.best) == "not run"


def test_a_process_that_the_limit_killed_has_failed_and_a_fault_of_ours_has_not() -> None:
    job = undivided(TINY, RESNET_20, 8, 0)
    assert ended_badly(job, -11, "")["error"] == "the process ended with SIGSEGV"
    said = "warning\nOpenBLAS error: Memory allocation still failed after 10 retries\n"
    assert ended_badly(job, 1, said)["error"].startswith("OpenBLAS error")
    with pytest.raises(RuntimeError, match="must train or run out of memory; got 1:\nKeyError: 3"):
        ended_badly(job, 1, "KeyError: 3\n  except MemoryError:")
    with pytest.raises(RuntimeError, match="must train or run out of memory; got SIGINT"):
        ended_badly(job, -2, "")


def test_a_refusal_of_memory_is_recognised_by_type_or_words() -> None:
    assert is_memory_failure(MemoryError())
    assert is_memory_failure(RuntimeError("DefaultCPUAllocator: can't allocate memory: 5 bytes"))
    assert is_memory_failure(RuntimeError("could not create a primitive"))
    assert not is_memory_failure(RuntimeError("shapes do not match"))
    assert first_line(ValueError("one\ntwo")) == "ValueError: one"
    assert first_line(MemoryError()) == "MemoryError"


def test_the_data_are_the_first_of_each_class_and_enough_crops(
    images: Path, masks: Path, tmp_path: Path
) -> None:
    for _ in range(2):  # again: the links of the first time are replaced
        found = prepare_images(images, 40, tmp_path / "links").folder
    names = [sorted(at.name for at in (found / part / "0").iterdir()) for part in ("train", "test")]
    assert names == [[f"{index:02}.png" for index in range(count)] for count in (20, 5)]
    assert prepare_images(images, None, tmp_path / "none").folder == images.resolve()
    assert prepare_masks(masks, 81).crops == 21  # 4 of 5 are for training
    assert prepare_masks(masks, None).crops == 1


def test_without_images_nothing_is_done_and_a_wrong_table_is_named(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.main(out=tmp_path / "out", folder=tmp_path / "runs")
    assert "give --images" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(typer.BadParameter, match=r"must name one of table1, .*; got table9"):
        run.main(images=images, only="table9", out=tmp_path / "out", folder=tmp_path / "runs")


def test_the_cap_of_the_command_line_is_that_of_every_model() -> None:
    found = run.chosen_preset(SMALL, "cpu", "24GiB", "", 0)
    assert {case.cap for case in found.cases} == {24 * 2**30}
    found = run.chosen_preset(SMALL, "cuda", "", "", 4)
    assert {case.malloc for case in found.cases} == {"default"}
    assert (found.device, found.workers) == ("cuda", 4)
    assert [case.cap for case in found.cases] == [case.cap for case in SMALL.cases]
    with pytest.raises(ValueError, match="cap must be a number of bytes"):
        run.chosen_preset(SMALL, "cpu", "many", "", 0)
