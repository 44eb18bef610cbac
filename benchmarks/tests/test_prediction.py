"""The benchmark of the prediction: its counts are right, its models too, and it runs."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import pytest
import torch
import typer
from benchmarks.mbs.prediction import growth, live, rows, run
from benchmarks.mbs.prediction.models import GOALS, OPTIMIZERS, SUBJECTS, Subject, densenet
from benchmarks.mbs.prediction.referee import allocated_peaks
from torch import Tensor, nn
from torch.nn import functional

from anybatch.memory.meter import Meter

KIB = 1024
FLOATS = KIB // 4  # in a KiB


def chain() -> None:
    """Blocks of 4, 8 and 4 KiB; at most 12 KiB of them at once."""
    a = torch.ones(4 * FLOATS)
    b = torch.cat([a, a])
    del a
    c = b[: 4 * FLOATS].neg()
    del b, c


def test_the_meter_and_the_allocator_count_the_same() -> None:
    with Meter(torch.device("cpu")) as meter:
        chain()
    after, inside = allocated_peaks(chain, 0, meter.timeline().events)
    assert meter.peak == after == inside == 12 * KIB
    assert allocated_peaks(chain, 5, meter.timeline().events)[0] == 12 * KIB + 5


def test_what_a_kernel_takes_inside_itself_is_no_live_tensor() -> None:
    x = torch.randn(4, 3, 16, 16)
    cell = nn.LSTM(8, 8)
    words = torch.randn(6, 2, 8)

    def forward() -> None:
        with torch.no_grad():
            functional.conv2d(x, torch.ones(4, 3, 3, 3))
            cell(words)

    with Meter(torch.device("cpu")) as meter:
        forward()
    after, inside = allocated_peaks(forward, 0, meter.timeline().events)
    assert after == meter.peak < inside


def test_nothing_run_is_nothing_counted() -> None:
    assert allocated_peaks(lambda: None, 7, []) == (7, 7)


def test_a_dense_layer_keeps_what_came_in() -> None:
    small = densenet((2, 3), growth=4)
    x = torch.randn(2, 3, 8, 8)
    passed: list[Tensor] = []
    for layer in small[:2]:
        x = layer(x)
        passed.append(x)
    assert torch.equal(passed[1][:, :8], passed[0])
    assert passed[1].shape == (2, 12, 8, 8)
    assert small(torch.randn(2, 3, 8, 8)).shape == (2, 10)


def test_densenet_has_the_layers_of_its_name() -> None:
    counted = sum(isinstance(m, nn.Conv2d | nn.Linear) for m in densenet(growth=2).modules())
    assert counted == 121


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_subject_takes_its_rows(name: str) -> None:
    subject = SUBJECTS[name]()
    inputs, targets = subject.rows(3)
    assert len(inputs) == len(targets) == 3
    assert subject.loss(subject.model(inputs), targets).dim() == 0
    assert set(GOALS) == set(rows.MODELS) == set(SUBJECTS)


def tiny() -> Subject:
    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 64), torch.randint(5, (size,))

    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 5))
    return Subject(model, nn.CrossEntropyLoss(), batch)


def test_two_models_are_foreseen_as_the_engine_foresees_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SUBJECTS, "tiny", tiny)
    for optimizer in OPTIMIZERS:
        names = ["undivided"] * 2 + ["in place"] * 2 + ["accumulator"]
        ways = live.ways((2, 5), (2, 5), (2,))
        assert [way.name for way in ways] == names
        pair = live.one_pair("tiny", optimizer, "cpu", ways)
        assert pair["agrees"]["engine"] == pair["agrees"]["here"]
        referee = pair["referee"]
        assert referee["meter"] <= referee["inside"]
        for cell in pair["ways"]:
            assert rows.spare(cell) >= 0, cell
        json.dumps(pair)


def test_a_step_that_holds_more_is_measured_as_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUBJECTS, "tiny", tiny)
    ready = live.Ready.of("tiny", "SGD", "cpu")
    states = sum(t.numel() * 4 for t in ready.subject.model.parameters())
    assert live.held(ready, lambda: None) == states
    assert live.held(ready, lambda: torch.ones(FLOATS)) == states + KIB


def test_the_peak_of_a_process_is_set_back_and_grows() -> None:
    if not growth.STATUS.exists():
        pytest.skip("the count of resident bytes is Linux's")
    cleared = growth.clear_peak()
    before = growth.peak()
    size = 64 * 1024 * KIB
    with mmap.mmap(-1, size) as block:  # pages that no allocator has had before
        block.write(b"x" * size)
    after = growth.peak()
    if cleared:
        assert after >= before + size // 2
    assert after >= growth.resident()


def test_growth_is_judged_with_the_tensors_that_were_there() -> None:
    cell = {"growth": 150 * 10**6, "states": 15 * 10**6, "predicted": 100 * 10**6}
    assert growth.judged(cell) == cell | {"ratio": 1.65, "within": True}
    assert not growth.judged(cell | {"states": 15 * 10**6 + 1})["within"]


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
def test_the_prediction_benchmark_runs_quickly_and_its_tables_are_written(tmp_path: Path) -> None:
    run.main(quick=True, out=tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["growth"]["transformer"]) == {"tight", "tight, planning too"}
    for table in (rows.prediction, rows.prediction_summary, rows.prediction_growth):
        assert table(results).startswith("|")
    assert "| yes |" in rows.prediction_summary(results)
    assert "transformer, AdamW, accumulator" in rows.prediction(results)


def test_too_little_foreseen_is_no_success() -> None:
    cell = {"predicted": 99, "first": 90, "measured": 100, "micro_batch": 2}
    assert rows.spare(cell) == -1
    assert not rows.good([cell], 0.01)
    assert not rows.good([cell | {"predicted": 102}], 0.01)
    assert rows.good([cell | {"predicted": 101}], 0.02)


def test_every_size_runs_with_one_optimizer_and_the_ends_with_all() -> None:
    for name in SUBJECTS:
        for optimizer in OPTIMIZERS:
            found_ways = run.ways_of(name, optimizer, quick=False)
            wanted = set(run.SIZES) if optimizer == "AdamW" else {2, 64}
            assert {way.micro_batch for way in found_ways} == wanted
            assert {2, 64} <= {way.micro_batch for way in found_ways if way.name == "in place"}


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(typer.BadParameter, match="needs a CUDA device, and there is none here"):
        run.main(device="cuda")
