from __future__ import annotations

import io
import re
import signal
import threading

import pytest
from rich.console import Console

from anybatch.cli.faults import Terminated, deaf, terminable, unbroken
from anybatch.cli.progress import Gauge, Live, PlainProgress, Progress, make_progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_appear_every_ten_seconds() -> None:
    clock, text = Clock(), io.StringIO()
    shown = PlainProgress(Console(file=text, width=200), clock)
    shown.begin_epoch(1, 3, 40)
    shown.micro_batch(8)
    assert text.getvalue() == ""
    clock.now += 9
    shown.micro_batch(8)
    clock.now += 1
    shown.step(0.25)
    shown.micro_batch(4)
    clock.now += 9
    shown.micro_batch(4)
    clock.now += 1
    shown.micro_batch(16)
    assert text.getvalue().splitlines() == [
        "epoch 1/3: 3/40 micro-batches, 2 images/s, loss 0.2500",
        "epoch 1/3: 5/40 micro-batches, 2 images/s, loss 0.2500",
    ]


def test_the_live_line_shows_epoch_micro_batches_speed_and_loss() -> None:
    clock, text = Clock(), io.StringIO()
    console = Console(file=text, force_terminal=True, width=100, color_system=None)
    shown = Live(console, clock)
    shown.micro_batch(1)
    for epoch in (1, 2):
        shown.begin_epoch(epoch, 2, 4)
        clock.now += 2
        shown.step(1.5)
        shown.micro_batch(6)
        shown.bar.refresh()
        shown.say(f"done {epoch}")
    shown.close()
    for part in ("epoch 1/2", "1/4", "3 images/s, loss 1.5000", "epoch 2/2", "done 2"):
        assert part in text.getvalue()


@pytest.mark.parametrize(
    ("width", "figures"),
    [
        (40, "1/120, 6 h left"),
        (60, "1/120, 6 h left, 21 images/s"),
        (66, "1/120, 6 h left, 21 images/s, loss 1.2345"),
        (80, "1/120, 6 h left, 21 images/s, loss 1.2345, peak 60 of 64 MiB"),
        (100, "1/120, 6 h left, 21 images/s, loss 1.2345, peak 60 of 64 MiB"),
        (200, "1/120, 6 h left, 21 images/s, loss 1.2345, peak 60 of 64 MiB"),
    ],
)
def test_the_live_line_keeps_its_bar_and_the_time_to_the_end(width: int, figures: str) -> None:
    """At 80 columns it had lost its bar; figures that have no room are left out, not cut."""
    clock, text = Clock(), io.StringIO()
    console = Console(file=text, force_terminal=True, width=width, color_system="standard")
    shown = Live(console, clock)
    shown.begin_epoch(1, 60, 120)
    clock.now += 3
    shown.step(1.2345, Gauge(60 * MIB, 64 * MIB))
    shown.micro_batch(64)
    shown.bar.refresh()
    shown.close()
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in text.getvalue().split("\r")]
    last = next(line for line in reversed(lines) if "left" in line).rstrip("\n")
    assert last.endswith(f" {figures}")
    assert len(last) <= width
    assert sum(letter in "━╸╺" for letter in last) >= 8


@pytest.mark.parametrize("width", [40, 80])
def test_a_long_line_is_broken_between_words_on_a_terminal_and_never_in_a_file(width: int) -> None:
    words = "memory 274 KiB of 400 KiB (as given), predicted by dry runs on few rows and fakes"
    for terminal in (True, False):
        text = io.StringIO()
        console = Console(file=text, force_terminal=terminal, width=width, color_system=None)
        PlainProgress(console).say(words)
        lines = text.getvalue().splitlines()
        assert " ".join(line.strip() for line in lines) == words
        assert (max(map(len, lines)) <= width) == terminal


def test_a_terminal_gets_a_live_line_and_a_file_plain_ones() -> None:
    assert isinstance(make_progress(Console(file=io.StringIO(), force_terminal=True)), Live)
    assert isinstance(make_progress(Console(file=io.StringIO())), PlainProgress)


MIB = 2**20


@pytest.mark.parametrize(
    ("measured", "predicted", "budget", "text"),
    [
        (61 * MIB, 63 * MIB, 64 * MIB, "peak 61 of 64 MiB"),
        (None, 63 * MIB - 1, 64 * MIB, "predicted peak 63 of 64 MiB"),
        (64 * MIB + 1, None, 64 * MIB, "peak 64.1 of 64 MiB"),  # over the budget, so never "64"
        (int(5.25 * 2**30), None, 6 * 2**30, "peak 5.3 of 6 GiB"),
        (900, None, 1023, "peak 900 of 1023 bytes"),
        (1000, None, 1536, "peak 1 of 1.5 KiB"),
        (0, None, 3 * 2**50, "peak 0 of 3072 TiB"),
    ],
)
def test_a_gauge_is_in_the_unit_of_its_budget(
    measured: int | None, predicted: int | None, budget: int, text: str
) -> None:
    assert str(Gauge.of(measured, predicted, budget)) == text


def test_without_a_budget_or_a_peak_there_is_no_gauge() -> None:
    assert Gauge.of(1, 1, None) is None
    assert Gauge.of(None, None, 1) is None


def test_the_peak_stands_behind_the_loss() -> None:
    text = io.StringIO()
    shown = PlainProgress(Console(file=text, width=200), Clock())
    shown.begin_epoch(1, 1, 1)
    shown.step(0.5, Gauge(61 * MIB, 64 * MIB))
    assert shown.figures()[1:] == ["loss 0.5000", "peak 61 of 64 MiB"]
    shown.step(0.5)
    assert shown.figures()[1:] == ["loss 0.5000"]


def test_silence() -> None:
    shown = Progress()
    shown.say("x")
    shown.begin_epoch(1, 1, 1)
    shown.micro_batch(1)
    shown.step(0.0)
    shown.close()


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []

    def work() -> None:
        with unbroken():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_waits_too_and_what_was_ignored_stays_so() -> None:
    done = []
    with pytest.raises(Terminated), terminable(), unbroken():
        signal.raise_signal(signal.SIGTERM)
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    try:
        deaf()
        with unbroken():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_that_is_not_pythons_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: pytest.fail("was set"))
    with unbroken():
        pass


def test_an_error_in_the_block_comes_through() -> None:
    with pytest.raises(ValueError, match=r"mine"), unbroken():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_another_thread_nothing_is_done() -> None:
    done = []

    def work() -> None:
        with terminable(), unbroken():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [1]
