"""The command under a real torchrun: Ctrl-C, `kill -9` of one rank, and going on after each."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import torch
from tests.cli.conftest import Make
from tests.cli.runs import checkpoint, rows

from anybatch.cli.settings import Settings
from anybatch.cli.train import resume, train

ROOT = Path(__file__).parents[2]
EPOCHS = 20
PATIENCE = 60.0
"""Seconds after which a run that does not end counts as hanging."""


def torchrun(*words: object) -> subprocess.Popen[str]:
    """Start the command as two ranks."""
    unset = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "anybatch", "train", *map(str, words)],
        cwd=ROOT,
        env={**unset, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], beginning: str) -> list[str]:
    """Read what the run says up to a line; return it."""
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if line.startswith(beginning):
            break
    return said


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Return the process of each rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = {}
    for child in map(int, children):
        matched = re.search(rb"(?:^|\0)RANK=(\d+)", Path(f"/proc/{child}/environ").read_bytes())
        if matched:
            found[int(matched.group(1))] = child
    return found


def test_ranks_that_are_killed_and_stopped_end_as_one_process_that_never_was(
    tmp_path: Path, classes: Make
) -> None:
    data, run = classes(count=8), tmp_path / "run"
    words = ("--data", data, "--model", "cnn:4", "--norm", "batch", "--optimizer", "sgd")
    words = (*words, "--lr", 0.01, "--batch-size", 6, "--micro-batch", 2, "--out", run)
    first = torchrun(*words, "--epochs", EPOCHS)
    said = wait_for(first, "epoch 2/")
    assert sum(line.startswith("malloc: ") for line in said) == 1
    os.kill(ranks_of(first)[1], signal.SIGKILL)
    _, errors = first.communicate(timeout=PATIENCE)
    assert errors.count("rank 1 of 2 is gone") == 1, errors
    assert "Traceback" not in errors.split("rank 1 of 2 is gone")[0], errors
    lost = json.loads((run / "summary.json").read_text())
    assert "rank 1 of 2 is gone" in lost["stopped"]

    second = torchrun("--resume", run, "--malloc", "default")
    wait_for(second, f"epoch {lost['epochs'] + 2}/")
    second.send_signal(signal.SIGINT)
    _, errors = second.communicate(timeout=PATIENCE)
    assert errors.count("interrupted after step ") == 1, errors
    assert "error: " not in errors
    stopped = json.loads((run / "summary.json").read_text())
    assert stopped["interrupted"] is True
    assert checkpoint(run)["step"] == stopped["steps"] >= 4

    summary = resume(run)
    assert (summary.resumed, summary.images, summary.epochs) == (2, 12 * EPOCHS, EPOCHS)
    settings = Settings(
        data=str(data), model="cnn:4", norm="batch", optimizer="sgd", lr=0.01, batch_size=6
    )
    settings = dataclasses.replace(settings, micro_batch=2, epochs=EPOCHS, threads=1)
    train(dataclasses.replace(settings, out=tmp_path / "one"))
    ours, theirs = checkpoint(run)["model"], checkpoint(tmp_path / "one")["model"]
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)
    steps = [row["step"] for row in rows(run) if row["kind"] == "step"]
    assert steps == list(range(1, 2 * EPOCHS + 1))
