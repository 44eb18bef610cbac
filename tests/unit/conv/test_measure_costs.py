"""What is measured of algorithms: a configuration holds no more than its workspace when it runs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.conv.problems import KINDS, bound, distance, drawn, operands, problem, wanted

from anybatch.conv import measure as costs
from anybatch.conv.algorithms import candidates, native, run
from anybatch.conv.chooser import Chooser, Convolutions
from anybatch.conv.divide import front
from anybatch.conv.fourier import Fourier
from anybatch.conv.measure import Costs, allocated, duel, held, machine, measure
from anybatch.conv.problem import KERNELS, Problem
from anybatch.core.plan_sections import Configuration, KernelPart
from anybatch.memory.meter import Meter

LOTS = 1 << 40
CPU = torch.device("cpu")


@pytest.mark.large(few=1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_configuration_keeps_to_its_workspace_and_is_right(
    dtype: str, counted: Callable[[int], int]
) -> None:
    rng = random.Random(7)
    for _ in range(counted(200)):
        one, size = drawn(rng, dtype), rng.randint(1, 5)
        if rng.random() < 0.3:  # large enough for tiles
            one = replace(one, image=tuple(h + 60 // len(one.image) ** 2 for h in one.image))
        a, b = operands(one, size)
        parts = Costs().parts(one, size, rng.choice(["all", "powerOfTwo"]), LOTS)
        true = wanted(one, a, b)
        own, scale = native(one, a, b), float(a.double().norm() * b.double().norm())
        mixed = tuple(rng.choice([p for p in parts if p.size == 1]) for _ in range(size))
        chosen = [*front(parts, size), Configuration((rng.choice(parts[:1]),))]
        for configuration in (*chosen, *([Configuration(mixed)] if size > 1 else [])):
            with Meter(CPU, {"operands": [a, b]}) as meter:
                found = run(one, configuration, (a, b), own.stride())
            its = distance(own, true, scale)
            assert distance(found, true, scale) <= bound(one, its), (one, configuration)
            undivided = configuration.parts[0].workspace == 0  # torch's own, which is not run here
            more = meter.peak - a.nbytes - b.nbytes - found.nbytes
            assert undivided or more <= configuration.workspace, (one, configuration)


def noted(done: list[str], name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, which notes its name."""

    def call(*arguments: Any) -> Any:
        done.append(name)
        return real(*arguments)

    return call


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_parts_have_in_common_is_done_once(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, done = problem(kernel, 2, "grouped"), list[str]()
    for name in ("shared", "finish"):
        monkeypatch.setattr(Fourier, name, noted(done, name, getattr(Fourier, name)))
    a, b = operands(one, 5)
    own = native(one, a, b)
    parts = tuple(KernelPart(*part, 1.0, 0) for part in ((2, "fft"), (2, "fft"), (1, "fft")))
    found = run(one, Configuration(parts), (a, b), own.stride())
    assert distance(found, wanted(one, a, b)) <= 1e-6
    assert done == ["finish" if kernel == "filter" else "shared"]


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


def test_a_duel_is_fought_once_and_decides_a_small_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fought: list[str] = []

    def made(one: Problem, size: int, name: str) -> tuple[float, int, float]:
        return (0.8 if name == "fft" else 1.0) * size / 100, 100, 0.0

    def fight(one: Problem, configuration: Configuration) -> float:
        fought.append(str(configuration))
        return 1.1 if one.kernel == "data" else 0.8

    monkeypatch.setattr(costs, "measure", made)
    monkeypatch.setattr(costs, "held", lambda one, size, name: 0)
    monkeypatch.setattr(costs, "duel", fight)
    path = tmp_path / "costs.sqlite"
    for _ in range(2):
        found = Convolutions(1 << 20, "powerOfTwo")
        chooser = Chooser(found, Costs(path), 60.0)
        keys = [(problem(kernel, 1, "padded"), 4) for kernel in KERNELS]
        chooser.choose(keys)
        chosen = [str(found.chosen[key].configurations[0])[:4] for key in keys]
        assert chosen == ["fft@", "nati", "fft@"]
    assert len(fought) == 3


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
