"""`plan --convolutions`, `bench --convolutions` and `--workspace`: tables, refusals."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.runs import Stopped, same_end
from tests.kernels import Problem, bytes_held, fought_as, measured_as
from tests.unit.conv.problems import KERNELS, problem
from torch import nn
from typer.testing import Result

from anybatch import Plan
from anybatch.cli.kernels import name_of, summary_of, table_of
from anybatch.cli.saved_run import Interrupted
from anybatch.cli.settings import Settings
from anybatch.cli.train import resume, train
from anybatch.kernels import KernelBenchmark, MeasuredKernel, record_kernels
from anybatch.reports import Configuration, KernelPart

pytestmark = pytest.mark.usefixtures("undrawn")


Command = Callable[..., Result]
MIB = 1 << 20


def wide(num_classes: int, **_: Any) -> nn.Module:
    """A network with a large window, for the command."""
    large = nn.Conv2d(4, 4, 7, padding=3, groups=4)
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), large, nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4, num_classes))


MODEL = ("--model", "tests.cli.test_kernels:wide", "--threads", 1)
PLAN = ("plan", *MODEL, "--batch-size", 16)
BENCH = ("bench", "--convolutions", *MODEL, "--micro-batch", 8)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Let FFT be fastest, and remember what was measured."""
    calls: list[tuple[int, str]] = []

    def made(one: Problem, size: int, name: str) -> tuple[float, int, float]:
        calls.append((size, name))
        return (0.001 if name == "fft" else 0.01) * size**0.9, bytes_held(one, size, name), 0.0

    measured_as(monkeypatch, made)
    return calls


def test_the_command_explains_every_layer(
    command: Command, tmp_path: Path, measured: list[tuple[int, str]]
) -> None:
    cache = tmp_path / "costs.sqlite"
    ended = command(*PLAN, "--memory", "4MiB", "--convolutions", "--cache", cache)
    assert ended.exit_code == 0, ended.output
    rows = [line.split() for line in ended.stdout.splitlines() if "fft@" in line]
    assert [row[:3] for row in rows] == [
        ["0", "forward", "16"],
        ["2", "forward", "16"],
        ["2", "data", "16"],
        ["2", "filter", "16"],
        ["0", "filter", "16"],
    ]
    assert all(row[-1] == "10.0" for row in rows)
    assert "5 of 5 kernels are not torch's own" in ended.stdout
    assert "workspace" in ended.stdout
    measured.clear()
    ended = command(*PLAN, "--json", "--workspace", "1MiB", "--cache", cache)
    plan = Plan.from_json(ended.stdout)
    assert plan.convolutions is not None
    assert plan.convolutions.workspace == MIB
    assert not measured


@pytest.mark.usefixtures("measured")
def test_a_total_is_divided_among_the_kernels(command: Command) -> None:
    words = "--convolutions", "--workspace-total", "400KB", "--memory", "4MiB"
    ended = command(*PLAN, *words)
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.count("fft@16") == 2
    assert ended.stdout.count("fft@8 x 2") == 3


def test_what_is_measured_is_saved_for_a_plan(
    command: Command, tmp_path: Path, measured: list[tuple[int, str]]
) -> None:
    cache = tmp_path / "costs.sqlite"
    ended = command(*BENCH, "--cache", cache)
    assert ended.exit_code == 0, ended.output
    assert f"Measurements are kept in {cache}." in ended.stdout
    assert "fft@8" in ended.stdout
    assert measured
    measured.clear()
    words = "--convolutions", "--batch-size", 8, "--workspace", "64MiB", "--memory", "200MiB"
    ended = command("plan", *MODEL, *words, "--cache", cache)
    assert ended.exit_code == 0, ended.output
    assert not measured


@pytest.mark.usefixtures("measured")
@pytest.mark.large(of="runs of the command that go on", few=2)
def test_training_with_a_workspace_goes_on_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Settings(model=MODEL[1], workspace="1MiB", memory="8MiB", batch_size=600, epochs=2)
    first, full = tmp_path / "first", tmp_path / "whole"
    with pytest.raises(Interrupted):
        train(dataclasses.replace(options, out=first, threads=1), Stopped(1))
    plan = Plan.from_json((first / "plan.json").read_text())
    assert plan.convolutions is not None
    assert "fft" in str(plan.to_json())

    def never(*_: Any) -> None:
        raise AssertionError("a run that goes on measures nothing")

    measured_as(monkeypatch, never)
    shutil.copytree(first, full)
    resume(full)
    with pytest.raises(Interrupted):
        resume(first, progress=Stopped(3))
    resume(first)
    assert same_end(first, full)
    assert Plan.from_json((full / "plan.json").read_text()).convolutions == plan.convolutions
    assert (first / "timeline.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*PLAN, "--convolutions", "--timeline"), "a plan is printed in one way at a time"),
        ((*PLAN, "--convolutions", "--json"), "; --convolutions and --json were given"),
        ((*PLAN, "--workspace-total", "1MiB"), "workspace-total and cache are for convolutions"),
        ((*PLAN, "--workspace", "much"), "workspace must be a number of bytes"),
        ((*PLAN, "--convolutions", "--workspace-total", "x"), "workspace-total must be a number"),
        (BENCH[:1], "bench must be told what to measure"),
        ((*BENCH, "--processes", 0), "seconds must be above 0 and processes at least 1"),
        (
            (*BENCH, "--cache", "/dev/null/x"),
            "measurements of convolutions must be stored in a file that can",
        ),
        ((*BENCH, "--workspace", "much"), "workspace must be a number of bytes"),
    ],
)
def test_what_makes_no_sense_is_refused(
    command: Command, words: tuple[object, ...], message: str
) -> None:
    ended = command(*words)
    assert ended.exit_code == 1
    assert message in ended.stderr.splitlines()[-1]


def test_kernels_are_recorded_without_a_trace() -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Dropout())
    x, rng_state = torch.randn(9, 1, 8), torch.get_rng_state()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    recorder = record_kernels(model, x)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(rng_state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert [size for _, size in recorder.keys] == [2, 2]
    assert [size for _, size in recorder.scaled(33)] == [33, 33]


def test_a_table_of_nothing_and_of_layers_that_are_alike() -> None:
    assert summary_of([]) == "The model has no convolutions that could be divided."
    own = Configuration((KernelPart(8, "native", 1.0, 0),))
    fast = Configuration((KernelPart(4, "fft", 0.1, 5 * MIB),) * 2)
    key = problem("filter", 2, "plain"), 8
    rows = [
        MeasuredKernel(("a", "b", "c"), key, 1.0, (own, fast), fast),
        MeasuredKernel((), key, 1.0, (own,), own),
    ]
    assert [name_of(row) for row in rows] == ["a and 2 more", "-"]
    assert len(list(table_of(rows).rows)) == 2
    assert "2 s become 1.2 s (1.7 times as fast) with 5.0 MiB" in summary_of(rows)
    recorder = record_kernels(nn.Linear(2, 2), torch.randn(3, 2))
    assert KernelBenchmark(MIB, cache=False).choose(recorder, recorder.scaled(8)) == []


def test_several_processes_measure_into_one_file(tmp_path: Path) -> None:
    keys = [(problem(kernel, 1, "plain"), 2) for kernel in KERNELS]
    several, single = (KernelBenchmark(MIB, cache=tmp_path / "costs.sqlite") for _ in range(2))
    assert set(several.measure(keys, seconds=60.0, processes=2)) == set(keys)
    assert list(single.measure(keys, seconds=60.0)) == keys
    assert single._parts == several._parts  # nothing was measured again


def test_an_interrupt_keeps_what_was_measured(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Problem] = []

    def made(one: Problem, size: int, name: str) -> tuple[float, int, float]:
        calls.append(one)
        if len(set(calls)) == 3:
            raise KeyboardInterrupt
        return 1.0, 0, 0.0

    measured_as(monkeypatch, made)
    cache = tmp_path / "costs.sqlite"
    ended = command(*BENCH, "--cache", cache)
    assert ended.exit_code == 130
    assert f"2 of 5 kernels were measured, and are kept in {cache}" in ended.stderr
    last = calls[-1]
    calls.clear()

    def goes_on(one: Problem, size: int, name: str) -> tuple[float, int, float]:
        calls.append(one)
        return 1.0, 0, 0.0

    measured_as(monkeypatch, goes_on)
    assert command(*BENCH, "--cache", cache).exit_code == 0
    assert calls[0] == last
    assert len(set(calls)) == 3


def test_a_file_that_is_lost_is_said_once(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "costs.sqlite"

    def made(one: Problem, size: int, name: str) -> tuple[float, int, float]:
        cache.write_bytes(b"no data base" * 1000)
        return 1.0, 0, 0.0

    measured_as(monkeypatch, made)
    ended = command(*BENCH, "--cache", cache)
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.count("are no longer stored in") == 1
    assert "Measurements are kept" not in ended.stdout


def test_the_table_shows_what_a_duel_has_decided(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(one: Problem, size: int, name: str) -> tuple[float, int, float]:
        return (0.8 if name == "fft" else 1.0) * size, bytes_held(one, size, name), 0.0

    fought: list[Problem] = []

    def lost(one: Problem, configuration: Configuration) -> float:
        fought.append(one)
        return 1.5 if one.kernel == "filter" else 0.5

    measured_as(monkeypatch, made)
    fought_as(monkeypatch, lost)
    cache = tmp_path / "costs.sqlite"
    ended = command(*BENCH, "--cache", cache)
    assert ended.exit_code == 0, ended.output
    assert "3 of 5 kernels are not torch's own" in ended.stdout
    assert len(fought) == 5
    words = "--convolutions", "--batch-size", 8, "--workspace", "64MiB", "--memory", "200MiB"
    ended = command("plan", *MODEL, *words, "--cache", cache)
    assert "convolutions 3 of 5 kernels not torch's own" in ended.stdout
    assert "3 of 5 kernels are not torch's own" in ended.stdout
    assert len(fought) == 5  # none again
