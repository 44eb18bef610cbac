"""A run that several ranks share is the run of one process: same weights, one log, one end."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Make
from tests.cli.runs import Stopped, checkpoint, rows, same_end
from tests.pool import Pool, ranks
from torch import Tensor, nn
from typer.testing import Result

from anybatch.cli.faults import DataError, TrainingError
from anybatch.cli.saved_run import Interrupted, Summary
from anybatch.cli.settings import Settings
from anybatch.cli.team import EARLY, Team
from anybatch.cli.train import resume, train
from anybatch.errors import RankError

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL = Settings(
    model="tests.cli.test_team:exact",
    optimizer="sgd",
    lr=0.05,
    epochs=2,
    batch_size=12,
    micro_batch=3,
    threads=1,
)
ROUNDING = 1e-9
"""Of twenty steps in float64."""


class Exact(nn.Module):
    """Float64, and samples meet in BatchNorm."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.head = nn.Linear(24, classes)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x.double()).flatten(1))
        return out


def exact(num_classes: int, in_channels: int) -> nn.Module:
    return Exact(num_classes, in_channels)


def unlike(num_classes: int, in_channels: int) -> nn.Module:
    model = Exact(num_classes, in_channels)
    nn.init.constant_(model.head.bias, os.getpid())
    return model


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with ranks(2) as pool:
        yield pool


def trained(rank: int, _size: int, settings: Settings, stop: int) -> tuple[Summary, list[str]]:
    shown = Stopped(stop if rank == 0 else 0)
    return train(settings, shown, team=Team.here()), shown.said


def resumed(_rank: int, _size: int, path: Path) -> tuple[Summary, list[str]]:
    shown = Stopped()
    return resume(path, progress=shown, team=Team.here()), shown.said


def difference(one: Path, other: Path) -> float:
    """Return the largest difference of two runs' weights and buffers."""
    ours, theirs = checkpoint(one)["model"], checkpoint(other)["model"]
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def figures(folder: Path) -> list[dict[str, Any]]:
    """Return the log without what each rank counts for itself."""
    return [{k: v for k, v in row.items() if k != "micro_batches"} for row in rows(folder)]


def close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        abs(one[k] - other[k]) < ROUNDING if isinstance(one[k], float) else one[k] == other[k]
        for k in one
    )


def test_two_ranks_train_as_one_process_would(tmp_path: Path, two: Pool, classes: Make) -> None:
    settings = dataclasses.replace(SMALL, data=str(classes(count=20)))  # 32: 12, 12 and 8
    single = train(dataclasses.replace(settings, out=tmp_path / "one"))
    (summary, said), (_, quiet) = two.run(
        trained, dataclasses.replace(settings, out=tmp_path / "two"), 0
    )
    assert difference(tmp_path / "one", tmp_path / "two") < ROUNDING
    found, want = figures(tmp_path / "two"), figures(tmp_path / "one")
    assert all(close(a, b) for a, b in zip(found, want, strict=True))
    assert (summary.ranks, summary.images, summary.last) == (2, single.images, single.last)
    assert summary.steps == single.steps == 6
    assert any(line.startswith("epoch 2/2") for line in said)
    assert quiet == []


def test_each_rank_plans_for_itself_and_all_keep_to_the_budget(
    tmp_path: Path, two: Pool, classes: Make
) -> None:
    small = dataclasses.replace(SMALL, data=str(classes(count=20)), epochs=1)
    settings = dataclasses.replace(small, micro_batch=None, memory="90KiB", out=tmp_path / "two")
    train(dataclasses.replace(small, out=tmp_path / "one"))
    (summary, _), _ = two.run(trained, settings, 0)
    assert difference(tmp_path / "one", tmp_path / "two") < ROUNDING
    plan = json.loads((tmp_path / "two" / "plan.json").read_text())
    assert plan["micro_batch"] == summary.micro_batch < 6
    peaks = [row["peak_bytes"] for row in map(json.loads, lines(tmp_path / "two")) if "loss" in row]
    assert 0 < max(peak for peak in peaks if peak) <= 90 << 10


def lines(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


def test_a_mini_batch_smaller_than_the_team_and_files_that_one_rank_cannot_read(
    tmp_path: Path, two: Pool, classes: Make
) -> None:
    data = classes(count=8)  # 12 to train on: 5, 5, 2; one of the last two cannot be read
    (data / "dark" / "1.png").write_bytes(b"no image")
    settings = dataclasses.replace(SMALL, data=str(data), batch_size=5, epochs=3, skip_corrupt=True)
    settings = dataclasses.replace(settings, micro_batch=2, checkpoint_minutes=0)
    train(dataclasses.replace(settings, out=tmp_path / "one"))
    (summary, said), _ = two.run(trained, dataclasses.replace(settings, out=tmp_path / "two"), 0)
    assert difference(tmp_path / "one", tmp_path / "two") < ROUNDING
    assert summary.skipped == 1
    assert sum(line.startswith("skipped ") for line in said) == 1


def test_masks_have_shares_without_rows_too(tmp_path: Path, two: Pool, masks: Make) -> None:
    settings = Settings(data=str(masks(count=4)), model="unet:2", norm="batch", epochs=1)
    settings = dataclasses.replace(settings, batch_size=2, micro_batch=1, threads=1)
    settings = dataclasses.replace(settings, out=tmp_path / "two")
    (summary, _), _ = two.run(trained, settings, 0)  # 3 to train on: 2 and 1
    assert (summary.images, summary.steps) == (3, 2)
    assert summary.metric == "iou"


def test_a_run_stopped_within_an_epoch_goes_on_bit_for_bit(
    tmp_path: Path, two: Pool, classes: Make
) -> None:
    settings = Settings(data=str(classes(count=8)), model="tests.cli.runs:drawing", threads=1)
    settings = dataclasses.replace(settings, batch_size=5, micro_batch=1, epochs=2, pad=1)
    settings = dataclasses.replace(settings, batchnorm="local")
    two.run(trained, dataclasses.replace(settings, out=tmp_path / "whole"), 0)
    first, second = two.each(trained, dataclasses.replace(settings, out=tmp_path / "cut"), 4)
    assert isinstance(first, Interrupted)
    assert isinstance(second, RankError)  # rank 0 stops within a step
    assert checkpoint(tmp_path / "cut")["step"] == 1
    (summary, said), _ = two.run(resumed, tmp_path / "cut")
    assert said[0] == "resumed after step 1, in epoch 1"
    assert summary.resumed == 1
    assert same_end(tmp_path / "whole", tmp_path / "cut")


def test_another_number_of_ranks_goes_on_up_to_rounding(
    tmp_path: Path, two: Pool, classes: Make
) -> None:
    small = dataclasses.replace(SMALL, data=str(classes(count=8)), batch_size=5, micro_batch=2)
    settings = dataclasses.replace(small, micro_batch=None, memory="60KiB")
    train(dataclasses.replace(small, out=tmp_path / "one"))
    two.each(trained, dataclasses.replace(settings, out=tmp_path / "cut"), 3)
    shown = Stopped()
    assert resume(tmp_path / "cut", progress=shown).ranks == 1
    assert any(line.startswith("ranks were 2 and are 1: ") for line in shown.said)
    assert difference(tmp_path / "one", tmp_path / "cut") < ROUNDING
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert "ranks" not in config["process"]


def test_batchnorm_of_all_ranks_becomes_exact_in_the_same_epoch(
    tmp_path: Path, two: Pool, classes: Make
) -> None:
    settings = dataclasses.replace(SMALL, data=str(classes(count=8)), batch_size=6, micro_batch=2)
    settings = dataclasses.replace(settings, lr=1e-9, epochs=9, memory="200KiB")
    settings = dataclasses.replace(settings, batchnorm="adaptive")
    found = two.run(trained, dataclasses.replace(settings, out=tmp_path / "whole"), 0)
    first, second = (summary.exact_from for summary, _ in found)
    assert first == second
    assert first is not None
    before = 4 * (first - 1)  # micro-batches of a rank
    two.each(trained, dataclasses.replace(settings, out=tmp_path / "cut"), before + 1)
    assert checkpoint(tmp_path / "cut")["epoch"] == first - 1
    two.run(resumed, tmp_path / "cut")
    assert same_end(tmp_path / "whole", tmp_path / "cut")


def interrupted(rank: int, size: int, settings: Settings, number: int) -> Any:
    """Train; a signal comes to the last rank only, in the first step."""

    def send_signal(_module: nn.Module, _inputs: Any) -> None:
        if rank == size - 1:
            signal.raise_signal(number)

    hook = nn.modules.module.register_module_forward_pre_hook(send_signal)
    try:
        return train(settings, team=Team.here())
    finally:
        hook.remove()


def test_a_signal_to_one_rank_ends_all_between_two_steps(
    tmp_path: Path, two: Pool, classes: Make
) -> None:
    settings = dataclasses.replace(SMALL, data=str(classes(count=8)), batch_size=6, micro_batch=2)
    settings = dataclasses.replace(settings, out=tmp_path / "run")
    planned = dataclasses.replace(settings, memory="1MiB")
    found = two.each(interrupted, planned, signal.SIGINT)  # while the step is planned
    assert [type(one) for one in found] == [KeyboardInterrupt, KeyboardInterrupt]
    assert not (tmp_path / "run").exists()
    found = two.each(interrupted, settings, signal.SIGTERM)
    assert all(isinstance(one, Interrupted) and one.terminated for one in found), found
    assert checkpoint(tmp_path / "run")["step"] == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["interrupted"] is True


def test_a_file_that_one_rank_cannot_read_ends_all(
    tmp_path: Path, two: Pool, classes: Make
) -> None:
    data = classes(count=8)
    settings = dataclasses.replace(SMALL, data=str(data), micro_batch=2, out=tmp_path / "run")
    two.run(trained, settings, 0)
    (data / "dark" / "7.png").write_bytes((data / "dark" / "7.png").read_bytes()[:60])
    found = two.each(trained, dataclasses.replace(settings, overwrite=True), 0)
    failed = next(rank for rank, one in enumerate(found) if isinstance(one, DataError))
    said = [str(one) for one in found]
    assert "7.png" in said[failed]
    if failed == 1:
        assert f"rank 1: DataError: {said[1]}" in said[0]
    assert checkpoint(tmp_path / "run")["step"] > 0  # the earlier run is there


def test_weights_that_differ_between_ranks_are_refused(two: Pool) -> None:
    settings = dataclasses.replace(SMALL, model="tests.cli.test_team:unlike")
    found = two.each(trained, settings, 0)
    assert all(isinstance(one, TrainingError) for one in found)
    assert "those of rank 1 are not those of rank 0" in str(found[0])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("words", "what"),
    [("plan", "plan"), ("check", "check"), ("train --compare --memory 1MiB", "compare")],
)
def test_what_one_process_does_is_refused_once(
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., Result],
    rank: int,
    words: str,
    what: str,
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("anybatch.cli.team.time.sleep", waited.append)
    for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("TORCHELASTIC_RUN_ID", "x")):
        monkeypatch.setenv(name, str(value))
    done = command(*words.split())
    assert done.exit_code == 1
    said = f"error: {what} must be run by one process; torchrun has started 2."
    assert done.stderr.startswith(said)
    assert waited == [EARLY] * rank  # for torchrun, to end it when rank 0 has said it


def test_one_gpu_is_not_shared_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    team = Team(3, 4)
    assert team.device("cuda") == "cuda:1"
    assert team.device("cpu") == "cpu"
    assert Team().device("cuda:0") == "cuda:0"
    with pytest.raises(Exception, match="device must be cuda where several processes train"):
        team.device("cuda:0")


def test_the_first_rank_draws_as_one_process_and_others_by_step() -> None:
    draws = {}
    for rank in (0, 1):
        for step in (4, 5):
            torch.manual_seed(0)
            Team(rank, 2).seed(7, step)
            draws[rank, step] = float(torch.rand(()))
    assert draws[0, 4] == draws[0, 5]
    assert len(set(draws.values())) == 3
