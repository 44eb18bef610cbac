"""The command with a budget: what it plans, keeps to, writes down, and refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Make
from tests.cli.runs import Drawing, Stopped, checkpoint, equal, rows, same_end
from tests.offloads import small_leave
from torch import Tensor, nn
from typer.testing import Result

from anybatch import Engine, Plan
from anybatch import plan as foresee
from anybatch.cli import planned
from anybatch.cli.build import build, make_optimizer
from anybatch.cli.faults import RunFolderError, SettingsError
from anybatch.cli.progress import Gauge
from anybatch.cli.saved_run import Interrupted
from anybatch.cli.settings import Settings
from anybatch.cli.train import resume, train
from anybatch.engine import measurement
from anybatch.errors import BudgetError

pytestmark = pytest.mark.usefixtures("undrawn")

Command = Callable[..., Result]
SMALL = ("--model", "cnn:4", "--epochs", "1", "--threads", "1", "--batch-size", "600")
DIGITS = Settings(
    model="tests.cli.runs:drawing", batchnorm="local", epochs=2, batch_size=600, threads=1
)


def quarter(settings: Settings) -> int:
    """Return a budget a quarter of the way from the least that fits to the undivided batch."""
    parts = build(settings)
    optimizer = make_optimizer(parts.recipe, parts.model.parameters())
    images, targets = zip(*(parts.train[1, i] for i in range(settings.batch_size)), strict=True)
    batch = torch.stack(images), torch.stack(targets)
    found = foresee(
        *(parts.model, parts.loss, batch),
        memory="1TiB",
        optimizer=optimizer,
        batchnorm=settings.batchnorm,
        timed=False,
    )
    assert found.memory is not None
    return found.memory.floor + (found.memory.undivided - found.memory.floor) // 4


@pytest.fixture(scope="module")
def budget() -> int:
    return quarter(DIGITS)


class Watched(Stopped):
    """Remembers what each step held and what an epoch was expected to take."""

    def __init__(self, at: int = 0) -> None:
        super().__init__(at)
        self.held: list[Gauge | None] = []
        self.expected = 0

    def begin_epoch(self, epoch: int, epochs: int, micro_batches: int) -> None:
        self.expected += micro_batches

    def step(self, loss: float, held: Gauge | None = None) -> None:
        super().step(loss)
        self.held.append(held)


def plan_of(folder: Path) -> Plan:
    text = (folder / "plan.json").read_text()
    assert checkpoint(folder)["plan"] == text
    return Plan.from_json(text)


def per_epoch(plan: Plan) -> int:
    return sum(-(-size // plan.micro_batch) for size in (600, 600, 237))


def test_a_budget_is_respected_and_its_plan_is_another_runs_micro_batch(
    tmp_path: Path, budget: int
) -> None:
    settings = dataclasses.replace(DIGITS, memory=budget)
    shown = Watched()
    summary = train(dataclasses.replace(settings, out=tmp_path / "run"), shown)
    plan = plan_of(tmp_path / "run")
    assert plan.memory is not None
    assert (plan.memory.budget, plan.micro_batch) == (budget, summary.micro_batch)
    assert plan.micro_batch < 600
    assert shown.said[0] == str(plan)
    assert shown.done == shown.expected == 2 * per_epoch(plan)
    held = [gauge for gauge in shown.held if gauge is not None]
    assert len(held) == 6
    assert all(gauge.peak <= gauge.budget == budget for gauge in held)
    assert not held[0].predicted  # measured
    single = dataclasses.replace(DIGITS, micro_batch=plan.micro_batch, out=tmp_path / "alone")
    train(single)
    one, other = (checkpoint(tmp_path / name) for name in ("run", "alone"))
    assert all(equal(one[name], other[name]) for name in ("model", "optimizer", "rng"))


@pytest.mark.large(of="runs of the command that go on", few=2)
def test_a_planned_run_goes_on_bit_for_bit(tmp_path: Path, budget: int) -> None:
    first, full = tmp_path / "first", tmp_path / "whole"
    with pytest.raises(Interrupted) as caught:
        train(dataclasses.replace(DIGITS, memory=budget, out=first), Stopped(1))
    assert caught.value.summary.steps == 0
    plan = plan_of(first)  # there before the first step
    shutil.copytree(first, full)
    shown = Watched()
    resume(full, progress=shown)
    assert shown.done == shown.expected == 2 * per_epoch(plan)
    for at in (2, per_epoch(plan) - 1, per_epoch(plan) + 1):
        run = tmp_path / f"run{at}"
        shutil.copytree(first, run)
        with pytest.raises(Interrupted):
            resume(run, progress=Stopped(at))
        resume(run, {"memory": budget})
        assert same_end(run, full)
        assert plan_of(run) == plan


def test_readers_of_images_and_masks_plan_too(tmp_path: Path, masks: Make) -> None:
    settings = Settings(
        data=str(masks(count=8)), model="unet:2", epochs=1, batch_size=5, crop=16, threads=1
    )
    budget = quarter(settings)
    for workers in (0, 1):
        out = tmp_path / f"{workers}"
        train(dataclasses.replace(settings, memory=budget, workers=workers, out=out))
        plan = plan_of(out)
        assert plan.mechanism == "two-pass"
        assert plan.memory is not None
        assert plan.memory.predicted <= budget


def test_without_a_word_the_plan_is_for_what_the_machine_has_left(
    command: Command, tmp_path: Path
) -> None:
    ended = command("train", *SMALL, "--out", tmp_path / "run")
    assert ended.exit_code == 0, ended.output
    plan = plan_of(tmp_path / "run")
    assert plan.memory is not None
    assert plan.memory.source.endswith(("less 20 %", "less 5 %"))
    assert str(plan) in ended.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["micro_batch"] == plan.micro_batch


def test_a_share_of_the_free_memory_is_a_budget(command: Command, tmp_path: Path) -> None:
    run, digits = tmp_path / "run", ("--model", "cnn:4", "--batch-size", "600", "--threads", "1")
    ended = command("train", *digits, "--epochs", "1", "--out", run, "--memory", "80%")
    assert ended.exit_code == 0, ended.output
    memory = plan_of(run).memory
    assert memory is not None
    assert memory.source.endswith("80 % of it")
    ended = command("plan", *digits, "--memory", "80%", "--convolutions")
    assert ended.exit_code == 0, ended.output
    assert "80 % of it" in ended.output
    ended = command("profile", *digits, "--memory", "80%", "--steps", "2")
    assert ended.exit_code == 0, ended.output


def test_a_micro_batch_in_a_budget_is_respected(command: Command, tmp_path: Path) -> None:
    words = ("train", *SMALL, "--micro-batch", 77, "--out", tmp_path / "run")
    ended = command(*words, "--memory", "1GiB")
    assert ended.exit_code == 0, ended.output
    assert plan_of(tmp_path / "run").micro_batch == 77
    assert (tmp_path / "run" / "timeline.json").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--memory", "1KiB"),
            "a step must fit in memory, and with micro-batches of one sample it needs ",
        ),
        (
            ("--memory", "nonsense"),
            "memory must be a number of bytes of at least 1, or a text such as "
            '"6GiB", "512MiB" or "1.5GB", or "80%", and it is \'nonsense\'.',
        ),
        (
            ("--memory", "500KiB", "--micro-batch", "600", "--offload", "off"),
            "a step must fit in memory, and micro-batches of 600 samples need ",
        ),
        (
            ("--memory", "1MiB", "--spill", "nowhere"),
            "spill must be a folder that can be written to, and of 'nowhere': it is not there",
        ),
        (
            ("--memory", "1MiB", "--offload", "host"),
            'offload must be "file" on cpu, where saved tensors go to a file, and it is "host"',
        ),
        (
            ("--micro-batch", "7", "--offload", "file"),
            "offload and spill need a budget to keep to; memory was not given",
        ),
        (
            ("--compare",),
            "compare needs a limit in bytes to hold both trainings to; --memory was not",
        ),
        (
            ("--compare", "--memory", "80%"),
            "compare needs a limit in bytes to hold both trainings to; --memory was 80%",
        ),
        (
            ("--memory", "0%"),
            "memory as a share of the free memory must be above 0 % and at most 100 %",
        ),
        (
            ("--compare", "--memory", "9MiB", "--compare-steps", "0"),
            "compare-steps must be at least 1; got 0",
        ),
        (("--compare", "--resume", "run"), "compare needs trainings from their first step; --res"),
        (("--compare", "--states", "auto"), "compare trains with everything in memory"),
        (("--replan",), "replan needs a run whose plan is made anew; --resume was not given"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_no_folder(
    command: Command, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    ended = command("train", *SMALL, "--out", tmp_path / "run", *words)
    assert ended.exit_code == 1
    assert ended.stderr.startswith(f"error: {message}")
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_one_sample_is_planned(tmp_path: Path, masks: Make) -> None:
    settings = Settings(
        data=str(masks(count=2)), model="unet:2", epochs=1, threads=1, memory="64MiB"
    )
    summary = train(dataclasses.replace(settings, out=tmp_path / "run"))
    assert (summary.train_samples, summary.steps) == (1, 1)
    assert plan_of(tmp_path / "run").mechanism == "undivided"


class Interrupting(Drawing):
    """Ctrl-C in every forward pass, once it is armed."""

    armed = True

    def forward(self, x: Tensor) -> Tensor:
        if Interrupting.armed:
            signal.raise_signal(signal.SIGINT)
        return super().forward(x)


def interrupting(num_classes: int, in_channels: int) -> nn.Module:
    return Interrupting(num_classes, in_channels)


def test_ctrl_c_while_the_plan_is_made_leaves_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "tests.cli.test_budget:interrupting"
    out = tmp_path / "run"
    settings = dataclasses.replace(DIGITS, model=model, memory="9MiB", out=out)
    words = ("train", "--model", model, "--batchnorm", "local", "--memory", "9MiB", "--out", out)
    ended = command(*words)
    assert ended.exit_code == 130
    assert ended.stderr == "interrupted before a step was taken; nothing was trained\n"
    assert not out.exists()
    monkeypatch.setattr(Interrupting, "armed", False)
    with pytest.raises(Interrupted):
        train(settings, Stopped(3))
    before = checkpoint(out)
    monkeypatch.setattr(Interrupting, "armed", True)
    with pytest.raises(KeyboardInterrupt):  # the earlier run is put back
        train(dataclasses.replace(settings, overwrite=True))
    with pytest.raises(Interrupted):  # and one that goes on is as it was
        resume(out, replan=True)
    assert equal(checkpoint(out), before)
    assert plan_of(out) == Plan.from_json(before["plan"])


def test_another_budget_is_refused_or_planned_anew(
    command: Command, tmp_path: Path, budget: int
) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(dataclasses.replace(DIGITS, memory=f"{budget}B", out=out), Stopped(1))
    for other in ("9MiB", "much"):
        refused = command("train", "--resume", out, "--memory", other)
        assert refused.exit_code == 1
        assert refused.stderr == (
            f"error: a resumed run keeps its settings: memory was {budget}B, got {other}. Leave "
            "the option out, or start a new run with another --out.\n"
        )
    plan = plan_of(out)
    with pytest.raises(BudgetError, match="micro-batches of one sample it needs"):
        resume(out, {"memory": "1KiB"}, replan=True)
    assert plan_of(out) == plan
    more = 2 * budget
    ended = command("train", "--resume", out, "--replan", "--memory", more)
    assert ended.exit_code == 0, ended.output
    assert "the plan is made anew: the end is that of the unbroken run up to rounding" in (
        ended.stdout
    )
    found = plan_of(out)
    assert found.memory is not None
    assert found.memory.budget == more
    assert json.loads((out / "config.json").read_text())["settings"]["memory"] == str(more)
    steps = [row["step"] for row in rows(out) if row["kind"] == "step"]
    assert steps == list(range(1, 7))


def test_a_size_that_was_passed_is_chosen_when_a_budget_is(tmp_path: Path, budget: int) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(dataclasses.replace(DIGITS, micro_batch=5, epochs=1, out=out), Stopped(200))
    with pytest.raises(
        SettingsError, match=r"replan needs something to plan; the run keeps to micro-batches of 5"
    ):
        resume(out, replan=True)
    resume(out, {"memory": budget}, replan=True)
    plan = plan_of(out)
    assert plan.memory is not None
    assert plan.memory.candidates
    assert json.loads((out / "config.json").read_text())["settings"]["micro_batch"] is None


def test_a_plan_of_another_version_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(dataclasses.replace(DIGITS, memory="9MiB", out=out), Stopped(1))
    torch.save({**checkpoint(out), "plan": '{"colour": 1}'}, out / "checkpoint.pt")
    with pytest.raises(RunFolderError, match=r"plan of this version of anybatch; .*colour.*--rep"):
        resume(out)


class Tight(Drawing):
    """Memory runs out above `available` samples."""

    available = 1000

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) > Tight.available and type(x) is Tensor:  # no rehearsal's
            raise torch.OutOfMemoryError("mine")
        return super().forward(x)


def tight(num_classes: int, in_channels: int) -> nn.Module:
    return Tight(num_classes, in_channels)


class Taking(Stopped):
    """Takes memory away after the second step."""

    def step(self, loss: float, held: Gauge | None = None) -> None:
        super().step(loss)
        if len(self.losses) == 2:
            Tight.available = 100


@pytest.mark.parametrize("memory", [None, "1GiB"])
def test_a_smaller_size_after_a_failure_is_the_runs(
    memory: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tight, "available", 1000)
    settings = dataclasses.replace(
        DIGITS, model="tests.cli.test_budget:tight", micro_batch=256, memory=memory
    )
    first, full = tmp_path / "first", tmp_path / "whole"
    shown = Taking()
    with pytest.raises(Interrupted):
        train(dataclasses.replace(settings, out=first), shown_until(shown, 4))
    plan = plan_of(first)
    assert plan.micro_batch == 60
    assert any("out of memory at 119 samples" in reason for reason in plan.reasons)
    assert [said.split()[2] for said in shown.said if said.startswith("plan")] == ["256", "60"]
    shutil.copytree(first, full)
    resume(full)
    sizes_used = [row["micro_batches"] for row in rows(full) if row["kind"] == "step"]
    assert sizes_used[:2] + sizes_used[3:] == [3, 3, 10, 10, 4]
    with pytest.raises(Interrupted):
        resume(first, progress=Stopped(12))
    resume(first)
    assert same_end(first, full)


def shown_until(shown: Taking, steps: int) -> Taking:
    """Let Ctrl-C come with the first micro-batch after so many steps."""
    micro_batch_shown = shown.micro_batch

    def micro_batch(samples: int) -> None:
        micro_batch_shown(samples)
        if len(shown.losses) == steps - 1:
            signal.raise_signal(signal.SIGINT)

    shown.micro_batch = micro_batch  # type: ignore[method-assign]
    return shown


def test_more_than_was_foreseen_makes_another_plan_at_once(
    tmp_path: Path, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = measurement.measured, []

    @contextlib.contextmanager
    def measured(*arguments: Any) -> Iterator[measurement.CountedBytes]:
        calls.append(1)
        more = budget if len(calls) == 1 else 0
        with real(*arguments) as found:
            yield measurement.CountedBytes(lambda: found.peak() + more, found.live)

    monkeypatch.setattr(measurement, "measured", measured)
    out = tmp_path / "run"
    shown = Taking()
    monkeypatch.setattr(Tight, "available", 1000)
    with pytest.raises(BudgetError, match="micro-batches of one sample it needs"):
        train(dataclasses.replace(DIGITS, memory=budget, out=out), shown)
    assert checkpoint(out)["step"] == 1  # it was taken, and is kept
    calls.clear()
    settings = dataclasses.replace(DIGITS, memory=3 * budget, micro_batch=None)
    out = tmp_path / "other"
    with pytest.raises(Interrupted):
        train(dataclasses.replace(settings, out=out), shown_until(Taking(), 2))
    found, plans = plan_of(out), 3 * budget
    assert found.memory is not None
    assert budget < found.memory.predicted <= plans
    resume(out)
    sizes_used = [row["micro_batches"] for row in rows(out) if row["kind"] == "step"]
    assert sizes_used[1:3] == [-(-600 // found.micro_batch), -(-237 // found.micro_batch)]


def test_a_system_that_does_not_tell_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(device: torch.device) -> None:
        raise ValueError("mine")

    monkeypatch.setattr(planned, "available_memory", left)
    with pytest.raises(
        SettingsError, match=r"memory must be given where the system does not report"
    ):
        train(DIGITS)
    assert train(dataclasses.replace(DIGITS, memory="1GiB", epochs=1)).steps == 3


PLAN = ("plan", "--model", "cnn:4", "--threads", "1", "--batch-size", "600", "--memory", "1MiB")


def test_plan_explains_and_trains_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = command(*PLAN)
    assert ended.exit_code == 0, ended.output
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("malloc: ")
    assert lines[1] == "plan"
    assert lines[-1] == (
        "Nothing was trained, and no size was timed: --measure times those that fit."
    )
    plan = Plan.from_json(command(*PLAN, "--json").stdout)
    assert "\n".join(lines[1:-1]) == str(plan)
    assert plan.memory is not None
    assert plan.memory.budget == 2**20
    assert {one.seconds for one in plan.memory.candidates} == {None}
    assert list(tmp_path.iterdir()) == []


def test_what_leaves_is_planned_saved_and_obeyed(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_leave(monkeypatch)
    offloaded = ("--offload", "file", "--spill", tmp_path)
    plan = Plan.from_json(command(*PLAN, *offloaded, "--micro-batch", 300, "--json").stdout)
    assert plan.offload is not None
    assert (plan.offload.store, plan.offload.folder) == ("file", str(tmp_path))
    assert plan.offload.sent > 0
    words = ("train", *SMALL, "--memory", "1MiB", "--micro-batch", 300)
    ended = command(*words, *offloaded, "--out", tmp_path / "run")
    assert ended.exit_code == 0, ended.output
    made = plan_of(tmp_path / "run")
    assert made.offload is not None
    assert made.offload.folder == str(tmp_path)
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    assert (settings["offload"], settings["spill"]) == ("file", str(tmp_path))
    command("train", *SMALL, "--micro-batch", 300, "--out", tmp_path / "alone")
    one, other = (checkpoint(tmp_path / name) for name in ("run", "alone"))
    assert equal(one["model"], other["model"])
    assert {path.name for path in tmp_path.iterdir()} == {"run", "alone"}


def test_the_test_has_the_memory_of_the_gradients(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, observed = Engine.evaluate, list[bool]()

    def watched(one: Engine, *arguments: Any, **named: Any) -> Any:
        observed.append(any(p.grad is not None for p in one.model.parameters()))
        return evaluate(one, *arguments, **named)

    monkeypatch.setattr(Engine, "evaluate", watched)
    command("train", *SMALL, "--micro-batch", 300, "--out", tmp_path / "run")
    assert observed
    assert not any(observed)


def test_plan_measures_on_request(command: Command) -> None:
    words = (*PLAN, "--measure", "--batch-size", 48, "--memory", "160KiB")  # 1 to 18 samples fit
    plan = Plan.from_json(command(*words, "--json").stdout)
    assert plan.memory is not None
    timed = {one.micro_batch: one.seconds for one in plan.memory.candidates if one.seconds}
    assert 1 < len(timed) < len(plan.memory.candidates)
    assert plan.micro_batch == min(timed, key=lambda size: timed[size])
    assert command(*words).stdout.endswith("timed, and all was put back.\n")
    fixed = command(*words, "--micro-batch", 7)
    assert "\n  micro-batch  7 samples\n" in fixed.stdout
    assert fixed.stdout.endswith("no size was timed: there is none to choose.\n")
    full = command(*words, "--norm", "batch", "--memory", "1GiB")
    assert full.stdout.endswith("no size was timed: there is none to choose.\n")


def test_plan_refuses_as_training_would(command: Command) -> None:
    for words, message in (
        (("--memory", "1KiB"), "a step must fit in memory, and with micro-batches of one sample"),
        (("--memory", "-3"), "memory must be a number of bytes of at least 1"),
    ):
        ended = command(*PLAN, *words)
        assert ended.exit_code == 1
        assert ended.stdout == "" or ended.stdout.startswith("malloc")
        assert ended.stderr.startswith(f"error: {message}")
