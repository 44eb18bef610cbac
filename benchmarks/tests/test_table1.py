"""Table 1 on a device: its quick form runs on the CPU, and its CUDA form on a stand-in for one."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.outofcore.table1 import clocks, one
from benchmarks.outofcore.table1.one import Job, run, run_in_process
from benchmarks.outofcore.table1.rows import table1
from benchmarks.outofcore.table1.run import bounds, main
from benchmarks.outofcore.table1.settings import (
    AGAIN,
    CACHING,
    EXPANDABLE,
    MEMORY,
    PAPER,
    QUICK,
    SAVED,
)
from benchmarks.results import read


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
def test_a_quick_run_keeps_its_cap_and_writes_the_table(tmp_path: Path) -> None:
    main(quick=True, out=tmp_path)
    results = read(tmp_path / "results.json")
    assert results is not None
    small, large = (results["sizes"][str(n)] for n in QUICK.sizes)
    assert all("failed" not in found for found in small.values())
    assert "holds" in large[MEMORY]["failed"]
    assert large[EXPANDABLE]["kind"] == "planned"
    assert large[EXPANDABLE]["peak"] <= QUICK.cap
    assert large[EXPANDABLE]["budget"] == int(QUICK.shares[1] * QUICK.cap)  # beside momentum
    assert large[EXPANDABLE]["out"] > 0
    text = table1(results)
    assert f"\n| {QUICK.sizes[1]} | x | " in text
    assert "of 2 batches reach 0.85 of the bound" in text


def test_without_cuda_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main(device="cuda", out=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_runs_in_memory_there_is_no_bound() -> None:
    machine = clocks.machine_of(torch.device("cpu"))
    found = {str(n): {MEMORY: {"failed": "no"}} for n in QUICK.sizes}
    assert bounds(QUICK, machine, found) == {}
    ways = {way: {"failed": "no"} for way in PAPER.ways}
    facts = {"link": {"out": 1e9, "back": 1e9}, "flops": 1e12, "memory": 1e9}
    setting = {"ways": PAPER.ways, "depth": 50, "cap": 16 << 30}
    text = table1({"sizes": {"190": ways}, "bounds": {}, "setting": setting, "measured": facts})
    assert "| 190 | x | x | x | x | x | x | x | x | 533 (0.92), 415 (0.71) |" in text


def test_every_way_of_the_paper_is_a_row() -> None:
    seconds = {MEMORY: 1.0, CACHING: 2.0, EXPANDABLE: 1.6, SAVED: 8.0, AGAIN: 1.25}
    ways = {way: {"seconds": s, "budget": 15 << 30} for way, s in seconds.items()}
    facts = {"link": {"out": 1e9, "back": 1e9}, "flops": 1e12, "memory": 1e9}
    text = table1(
        {
            "sizes": {"190": ways},
            "bounds": {"190": 1.408},
            "setting": {"ways": PAPER.ways, "depth": 50, "cap": 16 << 30},
            "measured": facts,
        }
    )
    row = "| 190 | 190.0 (1.00) | 95.0 (0.50) | 118.8 (0.62) | 23.8 (0.12) | 152.0 (0.80) "
    assert f"{row}| 134.9 (0.71) | 0.88 | 0.938 | 533 (0.92), 415 (0.71) |" in text
    assert "1 of 1 batches reach 0.85" in text


def test_a_process_has_the_allocator_of_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, Any]] = []

    def start(command: list[str], **options: Any) -> Any:
        started.append((json.loads(command[-1])["way"], options["env"].get(one.SEGMENTS)))
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps({"seconds": 1.0}))

    monkeypatch.setattr(subprocess, "run", start)
    job = Job("quick", "cpu", CACHING, 2, QUICK.cap, 1)
    for way in (CACHING, EXPANDABLE):
        assert run_in_process(replace(job, way=way)) == {"seconds": 1.0}
    assert started == [(CACHING, None), (EXPANDABLE, "expandable_segments:True")]


def test_what_does_not_fit_is_reported_and_other_errors_are_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job("quick", "cpu", EXPANDABLE, 4, 1 << 20, 1)
    assert "a step must fit in memory" in run(job)["failed"]

    def broken(job: Job) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(one, "_run", broken)
    with pytest.raises(RuntimeError, match="something else"):
        run(job)


def test_a_device_is_clocked_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return 250.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert clocks.usual(torch.device("cuda"), lambda: None) == 0.25
