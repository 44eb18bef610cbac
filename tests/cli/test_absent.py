"""`anybatch plan --device cuda:24GiB`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from typer.testing import Result

from anybatch import Plan
from anybatch.cli import explain

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
    ("asked", "message"),
    [
        (
            ("cuda:1Gx",),
            "the size of a device must be bytes such as in \"cuda:24GiB\", and it is '1Gx' in "
            "'cuda:1Gx': write it like that; one that is there has an index, as in cuda:0.",
        ),
        (
            ("mps:8GiB",),
            "a device that is not there must be a CUDA device with the size of its memory, such as "
            "\"cuda:24GiB\", and it is 'mps:8GiB': for another one name it, and give memory=.",
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
            "take 600 MiB: got '1GiB'. Give memory=\"424MiB\" or less, or leave it out.",
        ),
        (("cuda:640MiB",), "and 38.0 MiB is there (640MiB less 600 MiB for a context, less 5 %)"),
    ],
)
def test_it_refuses_in_one_line(command: Command, asked: tuple[str, ...], message: str) -> None:
    done = command(*PLAN, *asked)
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())


@pytest.mark.parametrize("verb", ["train", "check", "bench --convolutions"])
def test_other_commands_need_a_device_that_is_there(command: Command, verb: str) -> None:
    done = command(*verb.split(), "--device", "cuda:24GiB")
    assert done.exit_code != 0
    told = (
        "device must be one that torch can use here; got cuda:24GiB, the size of one that is not "
        "there. Only anybatch plan has use for that."
    )
    assert told in " ".join(done.output.split())
