"""`--workspace auto` and `--states auto`: what `plan` and `train` find out by themselves."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.runs import Stopped, checkpoint, equal, same_end
from tests.cli.test_kernels import MODEL, measured
from tests.kernels import measured_as
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from typer.testing import Result

from anybatch import Engine, Plan
from anybatch.cli.build import BatchNormPolicy, build, make_optimizer, seeded
from anybatch.cli.checkpoint import Trained
from anybatch.cli.explain import first_batch
from anybatch.cli.faults import SettingsError
from anybatch.cli.planned import PlannedEngine
from anybatch.cli.saved_run import Interrupted
from anybatch.cli.settings import Settings
from anybatch.cli.team import Team
from anybatch.cli.train import resume, train
from anybatch.core.plan import TRIED
from anybatch.execution.signature import Signature
from anybatch.offloading.parameters import PagedModel
from anybatch.planner.planner import Planner

pytestmark = pytest.mark.usefixtures("undrawn")

Command = Callable[..., Result]
DEEP = "tests.cli.test_auto:deep"
ADAM = ("--model", DEEP, "--optimizer", "adamw", "--batch-size", 300, "--threads", 1)

__all__ = ["measured"]


def deep(num_classes: int, **_: Any) -> nn.Module:
    """100 KiB of parameters, 16 KiB each, as many gradients, and twice as much state."""
    body = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(64, num_classes))


def plan_in(folder: Path) -> Plan:
    text = (folder / "plan.json").read_text()
    assert checkpoint(folder)["plan"] == text
    return Plan.from_json(text)


@pytest.fixture(params=[True, False], ids=["faster", "slower"])
def faster(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, measured: object
) -> bool:
    """Make up the seconds of steps with and without workspace; FFT is made up to be fast."""

    def seconds(engine: Engine, *_: object) -> float:
        assert engine.plan is not None
        return 1.0 if (engine.plan.convolutions is not None) == request.param else 2.0

    monkeypatch.setattr("anybatch.tools.planning.step_seconds", seconds)
    monkeypatch.setattr("anybatch.planner.workspaces.LEAST", 1 << 10)
    monkeypatch.setattr("anybatch.planner.workspaces.SHARES", (2,))
    return bool(request.param)


@pytest.mark.large(few=1)
def test_a_plan_says_which_shares_were_tried(command: Command, faster: bool) -> None:
    words = ("plan", *MODEL, "--batch-size", 16, "--memory", "2MiB", "--workspace", "auto")
    ended = command(*words, "--json")
    assert ended.exit_code == 0, ended.output
    plan = Plan.from_json(ended.stdout)
    assert (plan.convolutions is not None) == faster
    assert plan.reasons[-1].startswith(TRIED)
    assert "without workspace" in plan.reasons[-1]
    assert plan.memory is not None
    assert plan.memory.predicted <= plan.memory.budget == 2 << 20
    printed = command(*words, "--convolutions")
    assert ("fft@" in printed.stdout) == faster
    assert ("no share of the budget was worth it" in printed.stdout) != faster


@pytest.mark.large(few=1)
def test_a_training_shares_its_budget_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    """What was found is written down: nothing is tried or measured again, whoever goes on."""
    options = Settings(
        model=MODEL[1], workspace="auto", memory="4MiB", micro_batch=128, batch_size=768, epochs=1
    )
    options = dataclasses.replace(options, threads=1)
    first, full = tmp_path / "first", tmp_path / "whole"
    with pytest.raises(Interrupted):
        train(dataclasses.replace(options, out=first), Stopped(8))
    plan = plan_in(first)
    assert (plan.convolutions is not None) == faster
    assert plan.reasons[-1].startswith(TRIED)

    def never(*_: Any) -> None:
        raise AssertionError("a run that goes on measures nothing")

    measured_as(monkeypatch, never)
    monkeypatch.setattr("anybatch.tools.planning.step_seconds", never)
    shutil.copytree(first, full)
    resume(full, {"workspace": "auto"})
    with pytest.raises(Interrupted):
        resume(first, progress=Stopped(2))
    assert checkpoint(first)["step"] == 1
    resume(first)
    assert same_end(first, full)
    for run in (first, full):
        assert plan_in(run) == plan
    with pytest.raises(SettingsError, match="workspace was auto, got 1MiB"):
        resume(first, {"workspace": "1MiB"})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--workspace", "auto", "--micro-batch", 8),
            "memory must be given for workspace auto beside a micro-batch, since there is no budg",
        ),
        (
            ("--states", "auto", "--micro-batch", 8),
            "memory must be given for states auto beside a micro-batch, since there is no budget",
        ),
        (("--workspace", "aut"), '"1.5GB", or "auto", and it is'),
        (("--states", "aout"), "'aout' is not one of 'host', 'file', 'auto'"),
        (
            ("--states", "auto", "--memory", "20KiB"),
            "error: a step must fit in memory, and with micro-batches of one sample it needs",
        ),
    ],
)
@pytest.mark.parametrize("what", ["train", "plan"])
def test_what_means_nothing_is_refused(
    command: Command, tmp_path: Path, what: str, words: tuple[object, ...], said: str
) -> None:
    out = ("--out", tmp_path / "run") if what == "train" else ()
    ended = command(what, *ADAM, *words, *out)
    assert ended.exit_code != 0
    assert said in " ".join(ended.output.replace("│", " ").split())
    assert not (tmp_path / "run").exists()


def test_where_auto_has_no_meaning_it_is_refused(command: Command, tmp_path: Path) -> None:
    ended = command("profile", *ADAM, "--workspace", "auto")
    assert "workspace must be bytes where one loop is measured; got auto" in ended.stderr
    ended = command("plan", *ADAM, "--workspace", "auto", "--cache", tmp_path / "x")
    assert "workspace-total and cache are for a workspace in bytes" in ended.stderr
    with pytest.raises(SettingsError, match="must be bytes where several processes share each"):
        build(Settings(workspace="auto"), Team(0, 2))


def test_states_are_offloaded_where_nothing_fits_otherwise(command: Command) -> None:
    """First none, then the optimizer's, then parameters and gradients too."""

    def planned(memory: int | str, *more: object) -> Plan:
        ended = command("plan", *ADAM, "--memory", memory, *more, "--json")
        assert ended.exit_code == 0, ended.output
        plan = Plan.from_json(ended.stdout)
        assert plan.memory is not None
        assert plan.memory.predicted <= plan.memory.budget
        return plan

    here = planned("1GiB", "--states", "auto")
    assert here.states is None
    assert here.memory is not None
    offloaded = planned(here.memory.floor - 1, "--states", "auto")
    assert offloaded.states is not None
    assert (offloaded.states.store, offloaded.states.model) == ("file", False)
    both = planned("180KiB", "--states", "auto")
    assert both.states is not None
    assert both.states.model
    assert planned("180KiB", "--states", "file").states == both.states


@pytest.fixture
def resident_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Remember, whenever parameters come back for good, how many bytes had to stay before."""
    found, exit_paged = list[int](), PagedModel.exit

    def watched(self: PagedModel) -> None:
        assert self.pages.most <= self.pages.limit
        found.append(self.pages.pinned)
        exit_paged(self)

    monkeypatch.setattr(PagedModel, "exit", watched)
    return found


@pytest.mark.large(of="runs of the command that go on", few=2)
def test_a_training_offloads_parameters_and_gradients(
    tmp_path: Path, resident_bytes: list[int]
) -> None:
    """To the bit the training with all in memory, through checkpoints and an interrupt."""
    offloaded = Settings(
        model=DEEP,
        optimizer="adamw",
        epochs=1,
        batch_size=500,
        threads=1,
        memory="180KiB",
        states="auto",
        checkpoint_minutes=0,
    )
    first, full, here = tmp_path / "first", tmp_path / "whole", tmp_path / "here"
    with pytest.raises(Interrupted):
        train(dataclasses.replace(offloaded, out=first), Stopped(1))
    plan = plan_in(first)
    assert plan.states is not None
    assert plan.states.model
    shutil.copytree(first, full)
    resume(full)
    with pytest.raises(Interrupted):
        resume(first, progress=Stopped(500 // plan.micro_batch + 2))
    assert checkpoint(first)["step"] == 1
    resume(first)
    assert same_end(first, full)
    assert plan_in(first) == plan_in(full) == plan
    assert len(resident_bytes) == 5  # the plan's, and those of four processes
    assert set(resident_bytes) == {0}  # a checkpoint had none of them stay
    plain = dataclasses.replace(offloaded, memory=None, states=None, micro_batch=plan.micro_batch)
    train(dataclasses.replace(plain, out=here))
    one, other = checkpoint(full), checkpoint(here)
    assert all(equal(one[part], other[part]) for part in ("model", "optimizer"))
    assert _get_current_dispatch_mode_stack() == []


def test_a_new_plan_begins_with_all_in_memory(tmp_path: Path) -> None:
    """BatchNorm becomes exact on the way, so the plan is made anew, and more leaves, or less."""
    settings = Settings(model=DEEP, optimizer="adamw", batch_size=40, threads=1, states="file")
    settings = dataclasses.replace(settings, memory="180KiB", batchnorm="adaptive")
    with seeded(0, 1):
        parts, batch = first_batch(settings)
        optimizer = make_optimizer(parts.recipe, parts.model.parameters())
        with PlannedEngine(settings, parts, optimizer, BatchNormPolicy(settings, 40)) as planned:
            for _ in range(2):
                planned.make(batch)
                assert planned.pages
                planned.engine.backward(batch.inputs, batch.targets)
                optimizer.step()
                planned.forget()
                assert not planned.pages
                assert all(p.untyped_storage().size() for p in parts.model.parameters())
                state = optimizer.state.values()
                assert {v.device.type for one in state for v in one.values()} == {"cpu"}
                optimizer.zero_grad()


def test_what_a_step_has_held_more_is_not_forgotten_where_a_plan_is_obeyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine that obeys has no forecast to add it to; the one that comes later has it."""
    learn, more = Planner.learn, 60 << 10

    def held_more(self: Planner, signature: Signature, peak: int, *how: int, **named: bool) -> bool:
        return learn(self, signature, peak + more, *how, **named)

    monkeypatch.setattr(Planner, "learn", held_more)
    # No clock says which size is the fastest: the largest is.
    monkeypatch.setattr("anybatch.engine.step_builder.seconds_of_step", lambda *_: 1.0)
    settings = Settings(
        model=DEEP,
        optimizer="adamw",
        batch_size=300,
        threads=1,
        states="file",
        memory="400KiB",
        offload="off",
    )
    with seeded(0, 1):
        parts, batch = first_batch(settings)
        optimizer = make_optimizer(parts.recipe, parts.model.parameters())
        with PlannedEngine(settings, parts, optimizer, BatchNormPolicy(settings, 300)) as planned:
            planned.make(batch)
            assert planned.plan is not None
            before, reports = planned.plan.micro_batch, []
            for _ in range(3):
                optimizer.zero_grad()
                planned.engine.backward(batch.inputs, batch.targets)
                optimizer.step()
                planned.follow(batch)
                reports.append(planned.engine.last)
    first, *later = [report for report in reports if report is not None]
    assert first.micro_batch == before
    assert all(report.micro_batch < before for report in later)


def test_versions_of_modules_are_saved_where_parameters_are_copied() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    saved = Trained(model, optimizer, schedule).state(copies=True)["model"]
    assert saved._metadata == model.state_dict()._metadata
    assert saved["0.weight"].data_ptr() != model[0].weight.data_ptr()
