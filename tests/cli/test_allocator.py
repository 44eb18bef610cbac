from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from anybatch.cli import allocator
from anybatch.cli.allocator import RequestedMode, choose, decide, running, settings_of
from anybatch.cli.cli import app
from anybatch.cli.process import ENTRY

NEW, OLD = (2, 36), (2, 31)
WORDS = ("train", "--model", "cnn:4", "--epochs", "1", "--threads", "1", "--batch-size", "1500")
Execute = list[tuple[str, list[str], dict[str, str]]]


@pytest.fixture(autouse=True)
def _glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system be one with a new glibc, and nothing be set."""
    monkeypatch.setattr(allocator, "glibc", lambda: NEW)
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    for name in ("GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Execute:
    """Return the list of what would have replaced this process."""
    calls: Execute = []

    def execve(program: str, words: list[str], environment: dict[str, str]) -> None:
        calls.append((program, words, environment))
        raise SystemExit(77)

    monkeypatch.setattr(os, "execve", execve)
    return calls


def test_tight_is_for_a_budget_of_the_hosts_memory() -> None:
    assert choose("cpu", budgeted=True) == "tight"
    assert choose("cpu", budgeted=False) == "fast"
    assert choose("cuda", budgeted=True) == "fast"


@pytest.mark.parametrize("libc", [NEW, OLD])
@pytest.mark.parametrize("mode", ["default", "fast", "tight"])
def test_a_process_knows_the_mode_it_was_started_in(
    mode: allocator.Mode, libc: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator, "glibc", lambda: libc)
    environment = {"HOME": "/", "LD_PRELOAD": "libother.so", **settings_of(mode, libc)}
    assert running(environment) == mode
    assert ("GLIBC_TUNABLES" in environment) == (mode == "tight" and libc == NEW)
    assert running({**environment, "MALLOC_ARENA_MAX": "1"}) == "own"
    assert running({**environment, "LD_PRELOAD": "/lib/libjemalloc.so.2"}) == "own"


@pytest.mark.parametrize("requested", ["auto", "default", "fast", "tight"])
@pytest.mark.parametrize("budgeted", [False, True])
def test_a_process_is_started_again_once_at_most(requested: RequestedMode, budgeted: bool) -> None:
    first = decide(requested, "cpu", budgeted=budgeted, environment={"HOME": "/"})
    if first.environment is None:
        assert first.mode == requested == "default"
        return
    assert first.environment["HOME"] == "/"
    second = decide(requested, "cpu", budgeted=budgeted, environment=first.environment)
    assert second.environment is None
    assert str(second) == str(first)
    assert str(first).startswith(f"malloc: {first.mode} (")


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"])
def test_what_a_person_has_set_is_left(name: str) -> None:
    found = decide("tight", "cpu", budgeted=True, environment={name: "1"})
    assert found.environment is None
    assert str(found) == f"malloc: own (left as the environment says: {name})"


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "glibc", lambda: ())
    found = decide("fast", "cpu", budgeted=False, environment={})
    assert found.environment is None
    assert str(found).startswith("malloc: default (the modes are of glibc, which")


def test_the_version_of_glibc_is_read_on_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for platform, found, version in (
        ("linux", ("glibc", "2.36"), (2, 36)),
        ("linux", ("", ""), ()),
        ("darwin", ("glibc", "2.36"), ()),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr("platform.libc_ver", lambda found=found: found)
        assert allocator.glibc() == version


def test_the_commands_own_process_starts_itself_again(tmp_path: Path, executed: Execute) -> None:
    ended = CliRunner().invoke(app, [*WORDS, "--out", str(tmp_path / "run")], obj=ENTRY)
    assert ended.exit_code == 77
    ((program, words, environment),) = executed
    assert (program, words) == (sys.executable, [sys.executable, *sys.orig_argv[1:]])
    assert running(environment) == "fast"
    assert {**os.environ, **settings_of("fast", NEW)} == environment
    assert not (tmp_path / "run").exists()


def test_called_by_a_program_it_never_does(
    tmp_path: Path, executed: Execute, command: Callable[..., Result]
) -> None:
    ended = command(*WORDS, "--malloc", "tight", "--out", tmp_path / "run")
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.startswith("malloc: default (another mode is only for a process that the")
    assert not executed
    for name in ("summary.json", "config.json"):
        assert '"malloc": "default"' in (tmp_path / "run" / name).read_text()


def test_a_budget_asks_for_the_tight_mode(
    tmp_path: Path, executed: Execute, command: Callable[..., Result]
) -> None:
    run = tmp_path / "run"
    assert command(*WORDS, "--memory", "64MiB", "--out", run).exit_code == 0
    for words in (
        (*WORDS, "--memory", "64MiB", "--out", str(tmp_path / "new")),
        ("train", "--resume", str(run)),
        ("plan", "--memory", "64MiB", "--model", "cnn:4"),
    ):
        assert CliRunner().invoke(app, words, obj=ENTRY).exit_code == 77
        _, _, environment = executed.pop()
        assert running(environment) == "tight"
    assert not executed


def test_the_mode_is_in_the_summary_and_the_config(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    executed: Execute,
    command: Callable[..., Result],
) -> None:
    for name, value in settings_of("tight", NEW).items():
        monkeypatch.setenv(name, value)
    ended = command(*WORDS, "--malloc", "tight", "--out", tmp_path / "run")
    assert ended.stdout.startswith("malloc: tight (as --malloc says)\n")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["malloc"] == "tight"
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["process"] == {"threads": 1, "device": "cpu", "malloc": "tight"}
