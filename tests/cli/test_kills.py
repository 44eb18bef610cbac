"""`kill -9` at any instant, a full disk, a job scheduler: the run goes on from there."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.conftest import Make
from tests.cli.runs import checkpoint, rows, same_end

from anybatch.cli import allocator
from anybatch.cli.settings import Settings
from anybatch.cli.train import resume, train

ROOT = Path(__file__).parents[2]
POINTS = 60  # of death, in a soak
SMALL = Settings(
    model="tests.cli.runs:drawing",
    batchnorm="local",
    epochs=2,
    batch_size=5,
    micro_batch=4,
    pad=1,
    schedule="cosine",
    threads=1,
    checkpoint_minutes=0,
)
Run = Callable[[Settings, bool, tuple[str, int] | None], int]


Orders = Callable[[dict[str, Any]], int]


@pytest.fixture(scope="module")
def orders() -> Iterator[Orders]:
    """Return what sends an order to `tests.cli.mortal`; the exit code comes out."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.cli.mortal"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    to, answers = process.stdin, process.stdout

    def order(passed: dict[str, Any]) -> int:
        to.write(json.dumps(passed) + "\n")
        to.flush()
        return int(answers.readline())

    yield order
    to.close()
    process.wait()
    answers.close()


@pytest.fixture
def mortal(orders: Orders) -> Run:
    """Return what trains or resumes in a process that may be killed; its exit code comes out."""

    def run(settings: Settings, resumed: bool, at: tuple[str, int] | None) -> int:
        passed = {**dataclasses.asdict(settings), "out": str(settings.out)}
        return orders({"settings": passed, "resume": resumed, "at": at})

    return run


@pytest.fixture
def limited(orders: Orders, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Return the command that may write no file of more than `limit` bytes: code, and errors."""

    def run(*words: object, limit: int) -> tuple[int, str]:
        errors = tmp_path / "errors"
        passed = [*map(str, words), "--malloc", "default"]  # else it would start itself again
        code = orders({"words": passed, "limit": limit, "errors": str(errors)})
        return code, errors.read_text()

    return run


def test_a_run_killed_at_any_point_ends_as_the_unbroken_one(
    tmp_path: Path, classes: Make, mortal: Run, counted: Callable[[int], int]
) -> None:
    small = dataclasses.replace(SMALL, data=str(classes(count=8)))
    train(dataclasses.replace(small, out=tmp_path / "whole"))
    draw = np.random.default_rng(0)
    began = 0
    for number in range(counted(POINTS)):
        settings = dataclasses.replace(small, out=tmp_path / f"run{number}")
        where = ("file", "micro-batch")[number % 2]
        first, second = (
            int(draw.integers(1, {"file": 70, "micro-batch": 11}[where])) for _ in "12"
        )
        assert settings.out is not None
        assert mortal(settings, False, (where, first)) == -signal.SIGKILL
        if not (settings.out / "checkpoint.pt").exists():
            assert mortal(settings, True, None) == 1  # said in a line: there is no checkpoint
            continue
        began += 1
        assert mortal(settings, True, (where, second)) in (-signal.SIGKILL, 0)
        assert mortal(settings, True, None) == 0
        assert same_end(settings.out, tmp_path / "whole"), (where, first, second)
        steps = [row["step"] for row in rows(settings.out) if row["kind"] == "step"]
        assert steps == list(range(1, len(steps) + 1))
        assert not list(settings.out.glob(".*"))
    assert began > counted(POINTS) // 2


def test_a_run_killed_in_its_first_step_keeps_its_plan(
    tmp_path: Path, classes: Make, mortal: Run
) -> None:
    planned = dataclasses.replace(SMALL, data=str(classes(count=8)), micro_batch=None, epochs=1)
    planned = dataclasses.replace(planned, memory="1MiB", out=tmp_path / "run")
    assert mortal(planned, False, ("micro-batch", 1)) == -signal.SIGKILL
    plan = (tmp_path / "run" / "plan.json").read_bytes()
    assert mortal(planned, True, None) == 0
    assert (tmp_path / "run" / "plan.json").read_bytes() == plan
    assert checkpoint(tmp_path / "run")["plan"] == plan.decode()


def test_a_run_killed_before_its_first_checkpoint_leaves_the_earlier_one(
    tmp_path: Path, classes: Make, mortal: Run
) -> None:
    first = dataclasses.replace(SMALL, data=str(classes(count=8)), out=tmp_path / "run", epochs=1)
    train(first)
    before = checkpoint(tmp_path / "run")["seed"]
    again = dataclasses.replace(first, overwrite=True, seed=1, checkpoint_minutes=10)
    assert mortal(again, False, ("micro-batch", 1)) == -signal.SIGKILL
    assert resume(tmp_path / "run").seed == 1  # it had begun: there was its first checkpoint
    assert before == 0
    assert not (tmp_path / "run" / ".earlier").exists()


def command(*words: object) -> subprocess.Popen[str]:
    """Start the command as a process."""
    unset = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    return subprocess.Popen(
        [sys.executable, "-m", "anybatch", *map(str, words)],
        cwd=ROOT,
        env={**unset, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_disk_that_is_full_loses_no_checkpoint(
    tmp_path: Path, limited: Callable[..., tuple[int, str]]
) -> None:
    sizes = {"batch_size": 500, "micro_batch": 500, "epochs": 2, "threads": 1}
    train(Settings(out=tmp_path / "whole", model="cnn:16", **sizes))
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    words = ("train", "--model", "cnn:16", *options, "--out")
    code, errors = limited(*words, tmp_path / "full", limit=120_000)
    assert code == 1
    assert errors.startswith("error: checkpoint.pt cannot be written to ")
    assert errors.endswith(
        "File too large. What was written before is whole; make room, then go on with "
        f"--resume {tmp_path / 'full'}.\n"
    )
    assert checkpoint(tmp_path / "full")["step"] == 0
    summary = json.loads((tmp_path / "full" / "summary.json").read_text())
    assert "cannot be written" in summary["stopped"]
    assert resume(tmp_path / "full").resumed == 1
    assert same_end(tmp_path / "full", tmp_path / "whole")


def test_a_disk_too_full_for_the_first_checkpoint_promises_no_resume(
    tmp_path: Path, limited: Callable[..., tuple[int, str]]
) -> None:
    words = ("train", "--model", "cnn:4", "--epochs", 1, "--out", tmp_path / "r")
    code, errors = limited(*words, limit=9_000)
    assert code == 1
    assert errors.endswith(
        "File too large. No step is kept yet; make room, then start the run again.\n"
    )
    assert not (tmp_path / "r").exists()


def test_a_job_scheduler_gets_a_checkpoint_and_143(tmp_path: Path, classes: Make) -> None:
    words = ("train", "--data", classes(count=8), "--model", "cnn:4", "--threads", 1)
    words = (*words, "--batch-size", 6, "--micro-batch", 4, "--epochs", 3000, "--workers", 1)
    process = command(*words, "--out", tmp_path / "run")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 2/"):
            break
    os.killpg(process.pid, signal.SIGTERM)  # to the readers of images too, as schedulers do
    _, errors = process.communicate()
    assert process.returncode == 143, errors
    assert errors.startswith("interrupted after step ")
    assert errors.count("\n") == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["malloc"] == ("fast" if allocator.glibc() else "default")
    assert checkpoint(tmp_path / "run")["step"] == summary["steps"] >= 4


FORGOTTEN = """
import multiprocessing, signal
from anybatch import __main__
from anybatch.cli.faults import deaf

def read(begun):
    deaf()
    begun.set()
    while True:
        signal.pause()

fork = multiprocessing.get_context("fork")
begun = fork.Event()
fork.Process(target=read, args=(begun,), daemon=True).start()
begun.wait()
def app(obj):
    raise SystemExit(7)
__main__.app = app
__main__.main()
"""


def test_a_reader_without_a_loader_does_not_keep_the_command() -> None:
    ended = subprocess.run([sys.executable, "-c", FORGOTTEN], check=False, timeout=240)
    assert ended.returncode == 7
