from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import Make
from torch import nn
from typer.main import get_command
from typer.testing import Result

from anybatch import Engine, Plan
from anybatch.cli import train
from anybatch.cli.cli import app
from anybatch.cli.progress import Gauge, Progress
from anybatch.cli.report import drawing
from anybatch.cli.settings import Settings
from anybatch.conv.convolutions import plan_file
from anybatch.kernels import KernelBenchmark
from anybatch.reports import StepTimeline
from anybatch.units import show_bytes

Command = Callable[..., Result]
SMALL = ("--model", "cnn:4", "--epochs", "1", "--threads", "1")


def test_version_and_help(command: Command) -> None:
    assert command("--version").stdout == f"anybatch {metadata.version('anybatch')}\n"
    assert "train" in command("--help").stdout
    text = command("train", "--help").stdout
    for option in (
        *("--data", "--task", "--model", "--batch-size", "--micro-batch", "--epochs", "--out"),
        *("--lr", "--optimizer", "--momentum", "--weight-decay", "--schedule", "--seed"),
        *("--image-size", "--crop", "--norm", "--batchnorm", "--loss", "--workers", "--device"),
        *("--threads", "--skip-corrupt", "--overwrite", "--recipe", "--pad", "--flip"),
        *("--resume", "--checkpoint-minutes", "--malloc"),
        *("--memory", "--replan", "--compare", "--compare-steps"),
    ):
        assert option in text
    text = command("plan", "--help").stdout
    for option in ("--memory", "--micro-batch", "--measure", "--json", "--batch-size", "--malloc"):
        assert option in text


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["--help"], "Any batch size, in the memory", 0),
        (["--version"], metadata.version("anybatch"), 0),
        (["train", "--help"], "--memory", 0),
        (["train", "--no-such"], "No such option: --no-such", 2),
        (["report", "no-such-run"], "a report needs a run folder", 1),
    ],
    ids=str,
)
def test_help_needs_no_torch(words: list[str], said: str, code: int) -> None:
    """torch takes a second to import, and most of what the command imports."""
    told = (
        "import sys, anybatch.__main__ as m\ntry: m.main()\nfinally: print('torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", told, *words], capture_output=True, text=True, check=False
    )
    assert said in ended.stdout + ended.stderr
    assert (ended.returncode, ended.stdout.split()[-1]) == (code, "False")


def test_a_report_of_a_run_needs_no_torch(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = command("train", "--batch-size", 500, "--memory", "8MiB", "--out", out, *SMALL)
    assert ended.exit_code == 0, ended.output
    told = "import sys, anybatch.__main__ as m\ntry: m.main()\n"
    told += "finally: print('torch' in sys.modules)"
    report = [sys.executable, "-c", told, "report", str(out)]
    said = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    assert said.split()[-1] == "False"


def test_defaults_that_are_written_without_torch_are_those_of_the_library() -> None:
    bench = get_command(app).commands["bench"]
    defaults = {parameter.name: parameter.default for parameter in bench.params}
    assert defaults["workspace"] == KernelBenchmark.WORKSPACE
    assert drawing.FAR == StepTimeline.FAR


def test_plan_forgets_those_of_earlier_starts(command: Command) -> None:
    path = plan_file()
    assert path is not None
    x, y = torch.randn(8, 3), torch.randint(2, (8,))
    engine = Engine(nn.Linear(3, 2), nn.CrossEntropyLoss(), memory="1MiB", cache=path)
    engine.backward(x, y)
    assert path.exists()
    assert command("plan", "--forget").stdout == "1 program will be planned anew.\n"
    assert not path.exists()
    assert command("plan", "--forget").stdout == "0 programs will be planned anew.\n"


def test_train_shows_lines_and_a_table(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = command(
        "train", "--batch-size", 1024, "--micro-batch", 300, "--out", out, *SMALL, "--seed", 3
    )
    assert ended.exit_code == 0, ended.output
    summary = json.loads((out / "summary.json").read_text())
    assert "epoch 1/1: loss " in ended.stdout
    assert f"test accuracy {summary['last']:.4f}" in ended.stdout
    for cell in ("epochs", "1024", "300", "test accuracy", f"{100 * summary['last']:.2f} %"):
        assert cell in ended.stdout
    assert str(out) in ended.stdout
    assert (summary["batch_size"], summary["micro_batch"], summary["seed"]) == (1024, 300, 3)


def test_out_is_refused_or_overwritten(command: Command, tmp_path: Path) -> None:
    words = ("train", "--batch-size", 1500, "--micro-batch", 1500, "--out", tmp_path, *SMALL)
    (tmp_path / "mine.txt").write_text("")
    refused = command(*words)
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: out must be a new or an empty folder")
    assert command(*words, "--overwrite").exit_code == 0


def test_out_is_a_new_folder_below_runs(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = command("train", "--batch-size", 1500, "--micro-batch", 1500, *SMALL)
    assert ended.exit_code == 0, ended.output
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "checkpoint.pt").exists()


def test_folders_and_masks_train_by_command(
    command: Command, tmp_path: Path, classes: Make, masks: Make
) -> None:
    common = ("--epochs", 1, "--threads", 1, "--batch-size", 9, "--micro-batch", 4)
    ended = command("train", "--data", classes(), "--out", tmp_path / "a", *common, "--pad", 1)
    assert ended.exit_code == 0, ended.output
    assert "no test folder: 4 of 20 samples are held out" in ended.stdout
    sized = ("--model", "unet:2", "--image-size", "48x32", "--crop", 16, "--recipe", "mbs-unet")
    ended = command("train", "--data", masks(), "--out", tmp_path / "b", *common, *sized)
    assert ended.exit_code == 0, ended.output
    assert "test IoU" in ended.stdout
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["data"]["size"] == [32, 48]
    assert config["data"]["test_views"] == 2 * 6
    assert config["recipe"]["lr"] == 0.01


def test_skipped_files_are_counted(command: Command, tmp_path: Path, classes: Make) -> None:
    folder = classes(count=6)
    (folder / "dark" / "1.png").write_bytes(b"")
    words = ("train", "--data", folder, "--batch-size", 4, "--micro-batch", 4, *SMALL)
    refused = command(*words, "--out", tmp_path / "a")
    assert refused.exit_code == 1
    assert "1.png (cannot identify" in refused.stderr
    assert not (tmp_path / "a").exists()
    ended = command(*words, "--out", tmp_path / "b", "--skip-corrupt")
    assert ended.exit_code == 0, ended.output
    assert "1 file could not be read and was skipped." in ended.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "nowhere"), "data must be 'digits' or a folder that exists; got 'nowhere'"),
        (("--batch-size", "0", "--lr", "-1"), "batch-size must be at least 1; got 0; lr must not"),
        (("--model", "vgg"), "model must be one of cnn,"),
        (("--model", "unet"), "U-Net needs images whose height and width are multiples of 16"),
        (("--image-size", "big"), "image-size must be a number of pixels or WIDTHxHEIGHT"),
        (("--device", "toaster"), "device must be one that torch can use here; got 'toaster'"),
        (("--device", "hpu"), "device must be one that torch can use here; got 'hpu'"),
        (("--task", "segmentation"), "the digits have no masks"),
        (
            ("--model", "tests.cli.runs:drawing", "--micro-batch", "64"),
            "and these do, in forward or in the loss: calls. Call eval()",
        ),
    ],
)
def test_a_fault_is_one_line_and_exit_code_1(
    command: Command, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    ended = command("train", "--out", tmp_path / "run", "--threads", 1, *words)
    assert ended.exit_code == 1
    assert ended.stderr.startswith("error: ")
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "Traceback" not in ended.output


def test_a_word_that_is_no_choice_is_refused_by_the_parser(command: Command) -> None:
    ended = command("train", "--optimizer", "lion")
    assert ended.exit_code == 2
    assert "'sgd', 'adam', 'adamw'" in ended.stderr


def test_ctrl_c_exits_130_and_says_where_things_are(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(Progress):
        def step(self, loss: float, held: Gauge | None = None) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(train, "make_progress", lambda console: Impatient())
    out = tmp_path / "run"
    ended = command("train", "--out", out, "--batch-size", 500, *SMALL)
    assert ended.exit_code == 130
    assert ended.stderr == (
        f"interrupted after step 1 (0 whole epochs); checkpoint and summary are in {out}; "
        f"go on with --resume {out}\n"
    )
    assert json.loads((out / "summary.json").read_text())["interrupted"] is True

    def impatient(settings: Settings, progress: object, *, team: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train", impatient)
    ended = command("train", "--out", tmp_path / "b", *SMALL)
    assert (ended.exit_code, ended.stderr) == (
        130,
        "interrupted before a step was taken; nothing was trained\n",
    )


def test_why_prints_the_bytes_of_the_plan_in_its_row_and_the_way_that_it_has(
    command: Command,
) -> None:
    options = "--model", "cnn:4", "--batch-size", 64, "--memory", "200KiB", "--threads", 1
    found = command("why", *options)
    assert found.exit_code == 0, found.output
    memory = Plan.from_json(command("plan", "--json", *options).stdout).memory
    assert memory is not None
    assert memory.floor is not None
    (row,) = [line for line in found.stdout.splitlines() if line.startswith("micro-batches <")]
    assert f" {show_bytes(memory.floor)} " in row
    assert f" {show_bytes(memory.undivided)} " in row
    assert found.stdout.splitlines()[-1].startswith("The plan for 200 KiB is micro-batches, ")


def test_check_prints_the_report_and_exits_with_its_verdict(
    command: Command, classes: Make, masks: Make
) -> None:
    exact = command("check", "--model", "cnn:4", "--threads", 1)
    assert exact.exit_code == 0, exact.output
    assert exact.stdout.startswith("exact: 8 samples")
    coupled = command(
        *("check", "--data", masks(), "--model", "unet:2", "--batch-size", 3, "--threads", 1)
    )
    assert coupled.exit_code == 0, coupled.output
    normed = command("check", "--model", "cnn:4", "--norm", "batch", "--threads", 1)
    assert normed.exit_code == 0, normed.output
    assert normed.stdout.startswith("exact: 8 samples")
    assert "samples meet in BatchNorm" in normed.stdout
    refused = command("check", "--model", "tests.cli.runs:drawing", "--threads", 1)
    assert refused.exit_code == 1
    assert refused.stdout.startswith("NOT exact")
    folder = classes()
    fault = command("check", "--data", folder, "--crop", 99)
    assert fault.exit_code == 1
    assert fault.stderr.startswith("error: crop must be at most")


def test_check_names_a_broken_file(command: Command, classes: Make) -> None:
    folder = classes(count=4, size=64)
    words = ("check", "--data", folder, "--model", "cnn:2", "--image-size", 8, "--threads", 1)
    files = list(folder.rglob("*.png"))
    for file in files[1:]:
        file.write_bytes(file.read_bytes()[:100])
    assert "cannot be read" in command(*words).stderr
    ended = command(*words, "--skip-corrupt")
    assert ended.exit_code in (0, 1)
    assert "Traceback" not in ended.output
