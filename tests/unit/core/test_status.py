"""The line while work takes over a second: when it is shown, where, and that it goes again."""

from __future__ import annotations

import io
import logging

import pytest

from anybatch.core import status
from anybatch.core.status import KERNELS, Status, say


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the clock shows."""
    now = [0.0]
    monkeypatch.setattr(status, "monotonic", lambda: now[0])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    return now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(status, "_stream", lambda: stream)
    return stream


def test_short_work_says_nothing(clock: list[float], terminal: Terminal) -> None:
    line = Status()
    with line.of("planning", "skip"):
        clock[0] = 0.9
        line.at("a dry run")
    assert terminal.getvalue() == ""


def test_long_work_has_one_line_that_goes_when_it_ends(
    clock: list[float], terminal: Terminal
) -> None:
    line = Status()
    with line.of("planning", "micro_batch= skips this"):
        for second in (0.5, 1.0, 1.2, 1.6):
            clock[0] = second
            line.at(f"part {second}")
    written = terminal.getvalue()
    assert "part 1.0" in written
    assert "part 1.2" not in written  # it is written again only now and then
    assert "part 1.6 (micro_batch= skips this)" in written
    assert written.endswith("\r" + " " * 59 + "\r")
    assert "\n" not in written
    assert all(len(part) <= 59 for part in written.split("\r"))


def test_work_inside_work_is_a_part_of_it(clock: list[float], terminal: Terminal) -> None:
    line = Status()
    with line.of("planning", "skip"):
        clock[0] = 2.0
        with line.of("inspection", "other"):
            pass
        clock[0] = 3.0
        line.at("more")
    assert "planning, 2 s: inspection (skip)" in terminal.getvalue()
    assert "planning, 3 s: more (skip)" in terminal.getvalue()
    line.at("nothing is under way")
    line.tick()
    assert "nothing is under way" not in terminal.getvalue()


def test_kernels_look_at_the_clock_now_and_then(clock: list[float], terminal: Terminal) -> None:
    line = Status()
    with line.of("planning", "skip"):
        clock[0] = 5.0
        for _ in range(KERNELS - 1):
            line.tick()
        assert terminal.getvalue() == ""
        line.tick()
        assert "planning, 5 s (skip)" in terminal.getvalue()


def test_an_error_takes_the_line_away(clock: list[float], terminal: Terminal) -> None:
    line = Status()
    with pytest.raises(KeyboardInterrupt), line.of("planning", "skip"):
        clock[0] = 2.0
        line.at("part")
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith(" \r")
    assert line.work == ""


@pytest.mark.parametrize("rank", [None, "1"])
def test_without_a_terminal_or_on_other_ranks_it_goes_to_the_log(
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: str | None,
) -> None:
    stream = io.StringIO() if rank is None else Terminal()
    monkeypatch.setattr(status, "_stream", lambda: stream)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    line = Status()
    with caplog.at_level(logging.INFO, "anybatch"), line.of("planning", "skip"):
        clock[0] = 2.0
        line.at("part")
    assert caplog.messages == ["planning, 2 s: part (skip)"]
    assert stream.getvalue() == ""


def test_the_level_of_the_log_switches_it_off(
    clock: list[float], terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status.LOG, "level", logging.WARNING)
    line = Status()
    with line.of("planning", "skip"):
        clock[0] = 2.0
        line.at("part")
    say("something has left")
    assert terminal.getvalue() == ""


def test_what_remains_is_a_line_of_its_own(
    terminal: Terminal, caplog: pytest.LogCaptureFixture
) -> None:
    say("something has left")
    assert terminal.getvalue() == "anybatch: something has left\n"
    with caplog.at_level(logging.INFO, "anybatch"):
        say("to the log")
    assert caplog.messages == ["to the log"]
