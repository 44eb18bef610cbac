from __future__ import annotations

import dataclasses
import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Make
from torch import Tensor, nn

from anybatch.cli.build import build, seeded
from anybatch.cli.devices import find_device
from anybatch.cli.faults import DataError, RunFolderError, SettingsError, TrainingError
from anybatch.cli.progress import Gauge, Progress
from anybatch.cli.run_folder import RunFolder
from anybatch.cli.saved_run import Interrupted
from anybatch.cli.settings import Settings
from anybatch.cli.train import train
from anybatch.errors import NotExactError

pytestmark = pytest.mark.usefixtures("undrawn")

QUICK = Settings(model="cnn:4", epochs=2, batch_size=600, micro_batch=256, threads=1)


def lines(folder: Path, row_type: str) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == row_type]


def weights(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]  # type: ignore[no-any-return]


class Calls(Progress):
    """Progress that remembers, and may interrupt."""

    def __init__(self, interrupt_at: int = 0) -> None:
        self.said: list[str] = []
        self.samples: list[int] = []
        self.expected = 0
        self.losses: list[float] = []
        self.interrupt_at = interrupt_at
        self.closed = False

    def say(self, text: str) -> None:
        self.said.append(text)

    def begin_epoch(self, epoch: int, epochs: int, micro_batches: int) -> None:
        self.expected += micro_batches

    def micro_batch(self, samples: int) -> None:
        self.samples.append(samples)
        if len(self.samples) == self.interrupt_at:
            signal.raise_signal(signal.SIGINT)

    def step(self, loss: float, held: Gauge | None = None) -> None:
        self.losses.append(loss)

    def close(self) -> None:
        self.closed = True


def test_a_run_leaves_everything_behind(tmp_path: Path) -> None:
    shown = Calls()
    summary = train(dataclasses.replace(QUICK, out=tmp_path / "run"), shown)
    written = {file.name for file in (tmp_path / "run").iterdir()}
    assert {n for n in written if not n.startswith("events.out")} == {
        "config.json",
        "metrics.jsonl",
        "plan.json",
        "checkpoint.pt",
        "summary.json",
        "report.html",
    }
    steps, epochs = lines(tmp_path / "run", "step"), lines(tmp_path / "run", "epoch")
    assert [step["samples"] for step in steps] == [600, 600, 237] * 2
    assert [step["micro_batches"] for step in steps] == [3, 3, 1] * 2
    assert shown.samples == [256, 256, 88, 256, 256, 88, 237] * 2
    assert shown.expected == len(shown.samples)
    assert [step["loss"] for step in steps] == shown.losses
    mean = sum(step["loss"] * step["samples"] for step in steps[:3]) / 1437
    assert math.isclose(epochs[0]["train_loss"], mean, rel_tol=1e-12)
    assert shown.closed
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["micro_batch"] == 256
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["settings"]["batch_size"] == 600
    assert config["recipe"]["optimizer"] == "adamw"
    assert config["data"]["train_samples"] == 1437
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert saved["interrupted"] is False
    assert saved["versions"]["torch"] == torch.__version__
    assert {name: saved[name] for name in dataclasses.asdict(summary)} == dataclasses.asdict(
        summary
    )
    assert (summary.epochs, summary.steps, summary.images) == (2, 6, 2 * 1437)
    assert summary.last == epochs[1]["test_accuracy"]


def test_the_test_figures_are_those_of_the_undivided_test_set(tmp_path: Path) -> None:
    settings = dataclasses.replace(QUICK, out=tmp_path, batch_size=101, micro_batch=17, epochs=1)
    summary = train(settings)
    parts = build(settings)
    parts.model.load_state_dict(weights(tmp_path))
    images, classes = zip(*(parts.test[1, i] for i in range(360)), strict=True)
    with torch.no_grad():
        logits = parts.model.eval()(torch.stack(images))
    right = (logits.argmax(1) == torch.stack(classes)).sum().item()
    assert summary.last == right / 360
    full = nn.functional.cross_entropy(logits, torch.stack(classes)).item()
    assert summary.last_loss == pytest.approx(full, rel=1e-5)


def test_two_runs_are_equal_bit_for_bit_and_another_seed_is_not(
    tmp_path: Path, classes: Make
) -> None:
    settings = Settings(
        data=str(classes()),
        model="cnn:4",
        epochs=2,
        batch_size=7,
        micro_batch=3,
        pad=2,
        threads=1,
        seed=4,
    )
    before = torch.get_rng_state()
    runs = []
    for name, seed, workers in (("a", 4, 0), ("b", 4, 1), ("c", 5, 0)):
        torch.randn(3)
        train(dataclasses.replace(settings, out=tmp_path / name, seed=seed, workers=workers))
        runs.append(weights(tmp_path / name))
    assert all(torch.equal(runs[0][key], runs[1][key]) for key in runs[0])
    assert not all(torch.equal(runs[0][key], runs[2][key]) for key in runs[0])
    torch.set_rng_state(before)
    with seeded(1, 1):
        torch.randn(5)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_micro_batch_does_not_change_the_training(tmp_path: Path) -> None:
    runs = []
    for micro_batch in (600, 77):
        out = tmp_path / str(micro_batch)
        train(dataclasses.replace(QUICK, out=out, micro_batch=micro_batch, epochs=1))
        runs.append(lines(out, "step"))
    for one, other in zip(*runs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_classifier_learns_bright_from_dark(classes: Make) -> None:
    settings = Settings(
        data=str(classes(count=15)), model="resnet20", epochs=4, batch_size=16, micro_batch=5
    )
    summary = train(dataclasses.replace(settings, threads=1))
    assert summary.metric == "accuracy"
    assert summary.best == 1.0
    assert summary.run_folder is None


@pytest.mark.large(few=1)
@pytest.mark.parametrize("loss", ["bce+dice", "bce+dice-per-image"])
def test_a_unet_learns_squares(masks: Make, loss: str) -> None:
    settings = Settings(
        data=str(masks(count=10, size=32)),
        model="unet:4",
        epochs=20,
        batch_size=8,
        micro_batch=3,
        lr=0.01,
        crop=16,
        loss=loss,  # type: ignore[arg-type]
        threads=1,
    )
    summary = train(settings)
    assert summary.metric == "iou"
    assert summary.best is not None
    assert summary.best > 0.8
    assert (summary.train_samples, summary.test_samples) == (8, 2)


@pytest.mark.parametrize("interrupt_at", [1, 4, 8])
def test_ctrl_c_leaves_a_checkpoint_of_the_last_complete_step(
    tmp_path: Path, interrupt_at: int
) -> None:
    settings = dataclasses.replace(
        QUICK, out=tmp_path / "stopped"
    )  # steps of 3, 3, 1 micro-batches
    with pytest.raises(Interrupted) as caught:
        train(settings, Calls(interrupt_at))
    summary = caught.value.summary
    full = {1: 0, 4: 1, 8: 3}[interrupt_at]
    assert (summary.steps, summary.epochs) == (full, full // 3)
    saved = json.loads((tmp_path / "stopped" / "summary.json").read_text())
    assert saved["interrupted"] is True
    state = torch.load(tmp_path / "stopped" / "checkpoint.pt", weights_only=True)
    assert (state["step"], state["epoch"]) == (full, full // 3)
    if full == 3:  # the weights are those at the end of epoch 1, bit for bit
        train(dataclasses.replace(settings, out=tmp_path / "whole", epochs=1, schedule="constant"))
        train_one = dataclasses.replace(settings, out=tmp_path / "again", schedule="constant")
        with pytest.raises(Interrupted):
            train(train_one, Calls(interrupt_at))
        one, other = weights(tmp_path / "whole"), weights(tmp_path / "again")
        assert all(torch.equal(one[key], other[key]) for key in one)


def files(folder: Path) -> dict[str, bytes]:
    return {str(at.relative_to(folder)): at.read_bytes() for at in folder.rglob("*.*")}


def test_a_run_that_takes_no_step_leaves_the_one_it_was_to_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(QUICK, out=tmp_path, epochs=1)
    train(settings)
    (tmp_path / "notes.txt").write_text("mine")
    before = files(tmp_path)
    again = dataclasses.replace(settings, overwrite=True, seed=1)
    with pytest.raises(NotExactError):
        train(dataclasses.replace(again, model="tests.cli.runs:drawing"))
    assert files(tmp_path) == before
    with pytest.raises(TrainingError, match=r"in step 1 of epoch 1"):
        train(dataclasses.replace(again, model="tests.cli.test_train:never_a_number"))
    assert files(tmp_path) == before
    with pytest.raises(KeyboardInterrupt) as caught:
        train(again, Calls(interrupt_at=1))
    assert not isinstance(caught.value, Interrupted)
    assert files(tmp_path) == before
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "_start_events", lambda self, *rest: exec("raise MemoryError"))
        with pytest.raises(MemoryError):
            train(again)
    assert files(tmp_path) == before
    with pytest.raises(Interrupted):  # after the first step the new run is the one to keep
        train(again, Calls(interrupt_at=4))
    assert json.loads((tmp_path / "summary.json").read_text())["seed"] == 1
    assert not list(tmp_path.glob(".*"))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def never_a_number(**sizes: int) -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nn.init.constant_(model[1].weight, math.nan)
    return model


def test_a_loss_that_is_no_number_stops_the_run_and_saves_it(tmp_path: Path) -> None:
    settings = dataclasses.replace(QUICK, out=tmp_path, lr=1e30, optimizer="sgd", epochs=5)
    with pytest.raises(TrainingError, match=r"must be a finite number; got nan in step \d+ of epo"):
        train(settings)
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert "must be a finite number" in saved["stopped"]
    assert (tmp_path / "checkpoint.pt").exists()


def test_broken_images_stop_a_run_or_are_skipped(tmp_path: Path, classes: Make) -> None:
    folder = classes(count=10, size=64)
    for name in ("dark/0.png", "bright/3.png"):
        full = (folder / name).read_bytes()
        (folder / name).write_bytes(full[: len(full) // 2])
    settings = Settings(
        data=str(folder), model="cnn:2", epochs=2, batch_size=9, micro_batch=4, threads=1
    )
    with pytest.raises(DataError, match=r"2 files cannot be read: .*bright/3.png"):
        train(settings)
    shown = Calls()
    summary = train(dataclasses.replace(settings, skip_corrupt=True), shown)
    assert summary.skipped == 2
    assert summary.images == 2 * 14  # 16 training samples less two, twice
    assert sum(said.startswith("skipped ") for said in shown.said) == 2


def test_an_image_that_breaks_after_the_start_is_named(tmp_path: Path, classes: Make) -> None:
    folder = classes(count=10)

    class Vandal(Calls):
        def begin_epoch(self, epoch: int, epochs: int, micro_batches: int) -> None:
            for file in folder.rglob("*.png"):
                file.write_bytes(b"")

    settings = Settings(data=str(folder), model="cnn:2", epochs=1, batch_size=4, micro_batch=4)
    with pytest.raises(DataError, match=r"4 files cannot be read: .*png"):
        train(dataclasses.replace(settings, threads=1), Vandal())
    classes(count=10)
    with pytest.raises(DataError, match=r"no sample of an epoch could be read"):
        train(dataclasses.replace(settings, threads=1, skip_corrupt=True), Vandal())


def test_batchnorm_is_that_of_the_batch_or_local_by_name(tmp_path: Path) -> None:
    """Statistics move once a step, and the weights are those of the undivided batch."""

    def run(name: str, **change: Any) -> dict[str, Tensor]:
        settings = dataclasses.replace(QUICK, norm="batch", epochs=1, out=tmp_path / name)
        assert train(dataclasses.replace(settings, **change)).steps == 3
        return weights(tmp_path / name)

    full, split = run("whole", micro_batch=600), run("split")
    local = run("local", batchnorm="local")
    counts = [name for name in full if name.endswith("num_batches_tracked")]
    assert [int(split[name]) for name in counts] == [3] * len(counts)
    assert [int(local[name]) for name in counts] == [3 + 3 + 1] * len(counts)
    plan = json.loads((tmp_path / "split" / "plan.json").read_text())
    assert (plan["mechanism"], plan["exact"]["state"]) == ("lockstep", "shown")
    near, far = (
        max(float((found[name] - full[name]).abs().max()) for name in full if name not in counts)
        for found in (split, local)
    )
    assert near < far * torch.finfo(torch.float32).eps ** 0.5


def test_what_cannot_wait_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    settings = dataclasses.replace(QUICK, model="tests.cli.runs:drawing", epochs=1)
    with pytest.raises(NotExactError, match='batchnorm="local"'):
        train(dataclasses.replace(settings, out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()  # no step, no run


def test_a_full_disk_ends_the_run_with_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: RunFolder, state: object) -> None:
        raise RunFolderError("no space")

    monkeypatch.setattr(RunFolder, "save_checkpoint", refuse)
    with pytest.raises(RunFolderError, match=r"no space"):
        train(dataclasses.replace(QUICK, out=tmp_path))


def test_a_device_that_is_not_there_is_named() -> None:
    assert find_device("cpu") == torch.device("cpu")
    for name in ("nonsense", "cuda:99"):
        with pytest.raises(SettingsError, match=rf"device must be one .*got '{name}'"):
            find_device(name)
