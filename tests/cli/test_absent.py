"""`anybatch plan --device cuda:24GiB`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from typer.testing import Result

from anybatch import Plan
from anybatch.cli import explain
from anybatch.cli.devices import find_device
from anybatch.cli.faults import SettingsError

Command = Callable[..., Result]
PLAN = "plan", "--batch-size", "64", "--threads", "1", "--device"


def test_it_prints_a_plan_for_a_device_that_is_not_there(command: Command) -> None:
    done = command(*PLAN, "cuda:1GiB")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert "  device       planned for a CUDA device of 1GiB that is not there" in lines
    assert sum(line.startswith("    not measured   ") for line in lines) == 3
    assert "    not measured   the workspace that cuDNN takes for convolutions" in lines
    assert lines[-1] == explain.NOT_RUN
    assert explain.NOT_RUN == "Nothing was trained, and nothing was run: the device is not there."


def test_its_json_is_the_plan(command: Command) -> None:
    done = command(*PLAN, "cuda:1GiB", "--json", "--memory", "70MiB", "--states", "host")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["device"]["size"] == "1GiB"
    found = Plan.from_json(done.stdout)
    assert found.device is not None
    assert found.states is not None
    assert found.states.store == "host"
    assert found.memory is not None
    assert found.memory.budget == 70 << 20


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (
            ("cuda:1Gx",),
            "the size of a device must be bytes such as in \"cuda:24GiB\", and it is '1Gx' in "
            "'cuda:1Gx': write it like that; a device of this machine has an index, as in cuda:0.",
        ),
        (
            ("mps:8GiB",),
            "a device that is not there must be a CUDA device with the size of its memory, such as "
            "\"cuda:24GiB\", and it is 'mps:8GiB': write it like that; for a device of "
            "another type name only the type, and give --memory.",
        ),
        (
            ("cuda:1GiB", "--measure"),
            "measure or a goal must be measured on the device; a CUDA device of 1GiB is not there. "
            "Leave them out.",
        ),
        (
            ("cuda:1GiB", "--speedup", "2", "--workspace", "1MiB"),
            "measure or a goal and workspace or convolutions must be measured on the device; a "
            "CUDA device of 1GiB is not there. Leave them out.",
        ),
        (
            ("cuda:1GiB", "--memory", "1GiB"),
            "memory must be at most what the device leaves, and of 1GiB a context is assumed to "
            "take 600 MiB: got '1GiB'. Give --memory 424MiB or less, or leave it out.",
        ),
        (
            ("cuda:640MiB",),
            "and the budget is 38.0 MiB (640MiB less 600 MiB for a context, less 5 %)",
        ),
    ],
)
def test_it_refuses_in_one_line(command: Command, requested: tuple[str, ...], message: str) -> None:
    done = command(*PLAN, *requested)
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())


@pytest.mark.parametrize("verb", ["train", "check", "bench --convolutions"])
def test_other_commands_need_a_device_that_is_there(command: Command, verb: str) -> None:
    done = command(*verb.split(), "--device", "cuda:24GiB")
    assert done.exit_code != 0
    words = (
        "device must be one that torch can use here; got cuda:24GiB, the size of one that is not "
        "there. Only anybatch plan accepts that."
    )
    assert words in " ".join(done.output.split())


HERE = "device must be one that torch can use here; got "
SIZE = 'the size of a device must be bytes such as in "cuda:24GiB", and it is '
ABSENT = "a device that is not there must be a CUDA device with the size of its memory"


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", f"{HERE}'tpu' (Expected one of cpu, cuda, "),
        ("", f"{HERE}'' (Device string must not be empty). Leave --device out"),
        ("meta", f"{HERE}'meta' (its tensors have no data). Leave --device out"),
        ("mps", f"{HERE}'mps' (Could not run 'aten::empty.memory_format' with arguments from the "),
        ("hpu", f"{HERE}'hpu' (No module named 'torch.hpu'). Leave --device out"),
        ("lazy", f"{HERE}'lazy' ("),
        ("cuda:", f"{SIZE}'' in 'cuda:'"),
        ("cuda:0GiB", f"{SIZE}'0GiB' in 'cuda:0GiB'"),
        ("cuda:-1GiB", f"{SIZE}'-1GiB' in 'cuda:-1GiB'"),
        ("cuda:nanGiB", f"{SIZE}'nanGiB' in 'cuda:nanGiB'"),
        ("cuda:24", f"{HERE}'cuda:24' ("),
        ("cuda:99999999999999999999", f"{HERE}'cuda:99999999999999999999' (Could not parse"),
        ("CUDA:24GiB", f"{ABSENT}, such as \"cuda:24GiB\", and it is 'CUDA:24GiB'"),
        ("cpu:4GiB", f"{ABSENT}, such as \"cuda:24GiB\", and it is 'cpu:4GiB'"),
        ("xpu:8GiB", f"{ABSENT}, such as \"cuda:24GiB\", and it is 'xpu:8GiB'"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "train"])
def test_a_wrong_device_ends_in_one_line(
    command: Command, verb: str, device: str, message: str
) -> None:
    done = command(verb, "--batch-size", "64", "--device", device)
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    said = " ".join(done.output.split())
    assert message in said
    assert len(said[said.index("error: ") :]) < 400
    assert "Traceback" not in said


def test_a_number_beyond_the_devices_is_reported_with_their_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.ones(0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(SettingsError, match="got 'cuda:2' .of type cuda there are 2, counted from"):
        find_device("cuda:2")


@pytest.mark.parametrize("device", ["cuda:24GB", "cuda:24 GiB", "cpu", "cpu:0"])
def test_a_right_device_works(command: Command, device: str) -> None:
    done = command("plan", "--batch-size", "64", "--memory", "200MiB", "--device", device)
    assert done.exit_code == 0, done.output
