"""What is measured of algorithms: seconds, bytes and duels."""

from __future__ import annotations

import threading
from math import inf, prod
from pathlib import Path

import pytest
import torch
from tests.unit.conv.package import package
from tests.unit.conv.problems import KERNELS, KINDS, problem

from anybatch.conv import measure as costs
from anybatch.conv.measure import (
    Costs,
    Problem,
    allocated,
    candidates,
    duel,
    held,
    machine,
    measure,
)
from anybatch.reports import Configuration, KernelPart

__all__ = ["package"]
LOTS = 1 << 40
CPU = torch.device("cpu")


def test_measuring_stops_where_it_is_hopeless_too_large_or_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[int, str]] = []

    def made(one: object, size: int, name: str) -> tuple[float, int, float]:
        calls.append((size, name))
        return (9.0 if name == "im2col" else 1.0) * size, 100 * size, 0.0

    monkeypatch.setattr(costs, "measure", made)
    monkeypatch.setattr(costs, "held", lambda one, size, name: 0)
    one = problem("forward", 1, "padded")
    found = Costs().parts(one, 8, "powerOfTwo", 350)
    assert [p for p in found if p.size == 8] == [KernelPart(8, "native", 8.0, 0)]
    assert calls == [
        (1, "native"),  # how long all would take
        (8, "native"),  # what the others must beat
        (1, "im2col"),  # nine times as slow
        (1, "fft"),
        *((n, "native") for n in (2, 4)),  # 400 bytes are too many
        *((n, "fft") for n in (2, 4)),
    ]
    calls.clear()
    assert len(Costs(seconds=0).parts(one, 8, "powerOfTwo", 350)) == 1
    assert not calls


def test_a_file_is_shared_by_several_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, calls = threading.Lock(), list[tuple[int, str]]()

    def made(one: object, size: int, name: str) -> tuple[float, int, float]:
        with lock:
            calls.append((size, name))
        return float(size), 0, 8.0 - size

    monkeypatch.setattr(costs, "measure", made)
    path, one = tmp_path / "costs.sqlite", problem("data", 2, "plain")
    found: list[list[KernelPart]] = []

    def work() -> None:
        found.append(Costs(path).parts(one, 6, "all", LOTS))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(parts == found[0] for parts in found)
    assert {part.setup for part in found[0]} == {2.0}  # the shortest
    calls.clear()
    assert Costs(path).parts(one, 6, "all", LOTS) == found[0]
    assert not calls
    monkeypatch.setattr(costs, "machine", lambda device: "another")
    Costs(path).parts(one, 6, "undivided", LOTS)
    assert calls == [(6, name) for name in ("native", "im2col", "channels_last", "fft")]


@pytest.mark.large
@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_what_is_held_is_known_before_it_is_taken(dims: int, variant: str) -> None:
    for kernel in KERNELS:
        one = problem(kernel, dims, variant)
        for name in candidates(one):
            assert held(one, 3, name) == measure(one, 3, name)[1], name


def test_what_is_too_large_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    one, calls = problem("forward", 2, "padded"), list[str]()
    real = costs.measure

    def counted_measure(one: Problem, size: int, name: str) -> tuple[float, int, float]:
        calls.append(f"{name}@{size}")
        return real(one, size, name)

    monkeypatch.setattr(costs, "measure", counted_measure)
    limit = held(one, 1, "im2col") - 1
    found = Costs().parts(one, 4, "all", limit)
    assert not any(text.startswith("im2col") for text in calls)
    assert all(part.workspace <= limit for part in found)


def test_seconds_are_of_real_runs() -> None:
    one = problem("filter", 2, "padded")
    seconds, workspace, setup = measure(one, 2, "fft")
    assert seconds > 0
    assert setup > 0
    assert measure(one, 2, "native")[2] == 0
    assert workspace >= 8 * prod(one.weight)


def test_a_duel_is_of_real_runs() -> None:
    one = problem("filter", 2, "padded")
    ratio = duel(one, Configuration((KernelPart(2, "native", 1.0, 0),) * 4))
    assert 0 < ratio < 1000


def test_measuring_moves_no_rng_state() -> None:
    one, before = problem("forward", 1, "plain"), torch.get_rng_state()
    parts = Costs().parts(one, 2, "powerOfTwo", LOTS)
    duel(one, Configuration((parts[0],)))
    assert torch.equal(torch.get_rng_state(), before)


def test_on_cuda_the_allocator_tells_what_libraries_take(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    statistics = {
        "memory_allocated": 1000,
        "max_memory_allocated": 5000,
        "get_device_name": "a card",
    }
    for name, value in statistics.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: calls.append("reset"))
    with allocated(torch.device("cuda")) as most:
        assert most() == 4000
    assert calls == ["reset"]
    with allocated(CPU) as most:
        assert most() == 0
    was = machine("cuda")
    assert "a card" in was
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert machine("cuda") != was


@pytest.mark.usefixtures("package")
def test_plans_are_measured_with_their_workspace_and_missing_ones_take_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = problem("forward", 2, "plain")
    result = 4 * torch.Size(one.result(2)).numel()
    spaces = [measure(one, 2, f"cudnn:{number}")[1] for number in range(4)]
    # the package here computes by torch, which makes another result
    assert spaces[:3] == [2 * result + 5000, 2 * result + 100, 2 * result + 1]
    assert measure(one, 2, "cudnn:3") == (inf, 0, 0.0)
    assert held(one, 2, "cudnn:0") == result  # without computing, nobody tells more
    names = ["native", "cudnn:0", "cudnn:5"]
    monkeypatch.setattr(costs, "candidates", lambda _: names)
    parts = Costs().parts(one, 2, "powerOfTwo", 1 << 30)
    assert {p.algorithm for p in parts} == set(names)
    assert {p.seconds for p in parts if p.algorithm == "cudnn:5"} == {inf}


def test_tiles_hold_less_than_the_whole_image() -> None:
    long = Problem("forward", 32, 32, (4096,), (255,), (1,), (127,), (1,))
    assert held(long, 1, "overlap_save") < held(long, 1, "fft") / 2


@pytest.mark.parametrize(
    ("seconds", "measured"),
    [
        (0.0, []),
        (1.0, ["native@1"]),  # how long it takes is not known before
        (26.0, ["native@1"]),  # it takes 24 s more on 8
        (30.5, ["native@1", "native@8", "im2col@1"]),
    ],
)
def test_no_measurement_begins_that_is_expected_to_end_too_late(
    monkeypatch: pytest.MonkeyPatch, seconds: float, measured: list[str]
) -> None:
    """A kernel of 6 s was measured twice within 0.2 s: torch's own was always measured."""
    now, requested = [0.0], list[str]()

    def made(one: Problem, size: int, name: str) -> tuple[float, int, float]:
        requested.append(f"{name}@{size}")
        now[0] += 3 * size  # it is run three times, each a second a sample
        return float(size), 100, 0.0

    monkeypatch.setattr(costs, "perf_counter", lambda: now[0])
    monkeypatch.setattr(costs, "measure", made)
    found = Costs(seconds=seconds).parts(problem("forward", 1, "plain"), 8, "powerOfTwo", 1 << 40)
    assert [part.algorithm for part in found if part.size == 8][:1] == ["native"]
    assert requested == measured
    assert now[0] <= max(seconds, 3.0)
