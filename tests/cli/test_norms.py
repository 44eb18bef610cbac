"""`--batchnorm adaptive`: local until the training loss no longer falls, then exact."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Make
from tests.cli.runs import Stopped, checkpoint, same_end
from typer.testing import Result

from anybatch import Engine, Plan
from anybatch.cli.build import BatchNormPolicy
from anybatch.cli.saved_run import Interrupted
from anybatch.cli.settings import Settings
from anybatch.cli.train import resume, train

pytestmark = pytest.mark.usefixtures("undrawn")

ADAPTIVE = Settings(
    model="cnn:4",
    norm="batch",
    batchnorm="adaptive",
    lr=1e-9,  # so that the loss does not fall: 1 epoch that is the best, and 3 without a better
    epochs=6,
    batch_size=6,
    micro_batch=2,
    threads=1,
)
SAID = "BatchNorm is exact from epoch 5 on: the training loss has not fallen by 1 % for 3 epochs"


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Return the size of each mini-batch trained on, and how BatchNorm normalised it."""
    found: list[tuple[int, str]] = []
    backward = Engine.backward

    def recorded_backward(engine: Engine, *arguments: Any, **more: Any) -> torch.Tensor:
        loss = backward(engine, *arguments, **more)
        assert engine.last is not None
        found.append((engine.last.samples, engine.last.batchnorm))
        return loss

    monkeypatch.setattr(Engine, "backward", recorded_backward)
    return found


def lines(folder: Path, row_type: str) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text()
    return [row for row in map(json.loads, text.splitlines()) if row["kind"] == row_type]


def test_batchnorm_becomes_exact_when_the_training_loss_no_longer_falls(
    tmp_path: Path, classes: Make, modes: list[tuple[int, str]]
) -> None:
    settings = dataclasses.replace(ADAPTIVE, data=str(classes(count=8)), out=tmp_path / "run")
    shown = Stopped()
    assert train(settings, shown).exact_from == 5
    assert [mode for _, mode in modes] == ["local"] * 8 + ["exact"] * 4
    assert SAID in shown.said
    (row,) = lines(tmp_path / "run", "batchnorm")
    assert (row["epoch"], row["step"], row["change"]) == (4, 8, SAID)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["mechanism"] == "lockstep"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exact_from"] == 5


@pytest.mark.large(of="runs of the command that go on", few=2)
def test_a_run_goes_on_bit_for_bit_on_either_side_of_the_change(
    tmp_path: Path, classes: Make
) -> None:
    settings = dataclasses.replace(ADAPTIVE, data=str(classes(count=8)), memory="200KiB", epochs=5)
    train(dataclasses.replace(settings, out=tmp_path / "whole"))
    cut = tmp_path / "cut"
    with pytest.raises(Interrupted):
        train(dataclasses.replace(settings, out=cut), Stopped(23))
    with pytest.raises(Interrupted):  # one step later, the first after the change
        resume(cut, progress=Stopped(4))
    assert checkpoint(cut)["step"] == 8
    assert checkpoint(cut)["plan"] is not None
    resume(cut)
    assert same_end(tmp_path / "whole", cut)


def test_after_the_change_the_budget_holds_and_the_plan_is_for_lanes(
    tmp_path: Path, classes: Make
) -> None:
    settings = dataclasses.replace(ADAPTIVE, data=str(classes(count=8)), micro_batch=None)
    settings = dataclasses.replace(settings, memory="50KiB", batch_size=8)
    with pytest.raises(Interrupted):
        train(dataclasses.replace(settings, out=tmp_path / "run"), Stopped(30))
    assert Plan.from_json(checkpoint(tmp_path / "run")["plan"]).mechanism
    resume(tmp_path / "run")
    plan = Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    assert plan.mechanism == "lockstep"
    assert plan.memory is not None
    peaks = [row["peak_bytes"] for row in lines(tmp_path / "run", "step")]
    assert max(peak for peak in peaks if peak is not None) <= plan.memory.budget


def test_a_large_mini_batch_stays_local(
    tmp_path: Path, classes: Make, modes: list[tuple[int, str]]
) -> None:
    settings = dataclasses.replace(ADAPTIVE, data=str(classes(count=8)), out=tmp_path / "run")
    settings = dataclasses.replace(settings, batch_size=7, max_batch=6, epochs=10)
    shown = Stopped()
    train(settings, shown)
    assert {mode for size, mode in modes if size == 7} == {"local"}
    assert modes[-1] == (5, "exact")  # a last, smaller one
    assert any("stays local where a mini-batch has 6 samples or more" in s for s in shown.said)


def test_what_is_not_adaptive_remembers_nothing_and_old_checkpoints_load() -> None:
    norms = BatchNormPolicy(Settings(), 8)
    assert norms.measured(1, 1.0) is None
    assert norms.state() is None
    for batchnorm in ("exact", "adaptive"):
        BatchNormPolicy(Settings(batchnorm=batchnorm), 8).put_back(None)  # type: ignore[arg-type]


def test_the_limit_is_for_the_adaptive_mode(command: Callable[..., Result]) -> None:
    done = command("train", "--max-batch", 8)
    assert done.stderr == "error: max-batch is for batchnorm adaptive; batchnorm is exact.\n"
    words = ("plan", "--model", "cnn:4", "--norm", "batch", "--batchnorm", "adaptive")
    done = command(*words, "--batch-size", 300, "--micro-batch", 100)
    assert "local" in done.stdout
