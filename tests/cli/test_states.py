"""The optimizer's state of a run waits in a file: the same run, planned, resumed, explained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.runs import Stopped, checkpoint, equal, same_end
from typer.testing import Result

from anybatch import Plan
from anybatch.cli.saved_run import Interrupted
from anybatch.cli.settings import Settings
from anybatch.cli.train import resume, train

pytestmark = pytest.mark.usefixtures("undrawn")

Command = Callable[..., Result]

ADAM = Settings(
    model="cnn:16",
    optimizer="adamw",
    epochs=2,
    batch_size=700,
    micro_batch=350,
    threads=1,
)


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with all in memory."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(dataclasses.replace(ADAM, out=out))
    return out


def test_a_run_is_bit_for_bit_that_in_memory(full_run: Path, tmp_path: Path) -> None:
    spill, out = tmp_path / "spill", tmp_path / "run"
    spill.mkdir()
    train(dataclasses.replace(ADAM, states="file", spill=str(spill), out=out))
    one, other = checkpoint(out), checkpoint(full_run)
    for part in ("model", "optimizer"):
        assert equal(one[part], other[part])
    assert list(spill.iterdir()) == []


@pytest.mark.large(of="runs of the command that go on", few=2)
def test_a_planned_run_goes_on_with_its_states_offloaded(tmp_path: Path) -> None:
    offloaded = dataclasses.replace(ADAM, states="file", memory="64MiB")
    unbroken, stopped = tmp_path / "unbroken", tmp_path / "stopped"
    train(dataclasses.replace(offloaded, out=unbroken))
    with pytest.raises(Interrupted):
        train(dataclasses.replace(offloaded, out=stopped), Stopped(3))
    plan = Plan.from_json((stopped / "plan.json").read_text())
    assert plan.states is not None
    assert plan.states.store == "file"
    resume(stopped)
    same_end(stopped, unbroken)
    assert Plan.from_json((stopped / "plan.json").read_text()) == plan


def test_a_plan_counts_what_is_in_memory_at_a_time(command: Command, tmp_path: Path) -> None:
    words = ("plan", "--model", "cnn:16", "--optimizer", "adamw", "--memory", "1GiB", "--json")
    offloaded = Plan.from_json(command(*words, "--states", "file", "--spill", tmp_path).stdout)
    here = Plan.from_json(command(*words).stdout)
    assert here.states is None
    assert offloaded.states is not None
    assert offloaded.states.folder == str(tmp_path)
    assert offloaded.memory is not None
    assert here.memory is not None
    assert dict(offloaded.memory.owners)["optimizer"] <= dict(here.memory.owners)["optimizer"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--states", "host"), "error: states must be file or auto on cpu, and it is 'host'."),
        (("--states", "disk"), "'disk' is not one of 'host', 'file', 'auto'"),
        (("--states", "file", "--spill", "nowhere"), "spill must be a folder that can be wri"),
    ],
)
@pytest.mark.parametrize("what", ["train", "plan"])
def test_where_it_cannot_wait_is_refused(
    command: Command, tmp_path: Path, what: str, words: tuple[str, ...], said: str
) -> None:
    out = ("--out", tmp_path / "run") if what == "train" else ()
    ended = command(what, "--model", "cnn:4", "--device", "cpu", *words, *out)
    assert ended.exit_code != 0
    assert said in " ".join(ended.output.replace("│", " ").split())
    assert not (tmp_path / "run").exists()
