"""Errors of the command, one type for each fault that a user can fix.

A command must end in one line with the requirement, the actual value and the remedy, never in a
traceback. Python's own exceptions do not distinguish a fault in the user's data from a bug, so the
command prints exactly the errors below (and the library's) and raises everything else.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from anybatch.errors import AnybatchError


class SettingsError(AnybatchError):
    """A setting of the command does not make sense."""


class DataError(AnybatchError):
    """The data folder, or something in it, cannot be used."""


class ModelError(AnybatchError):
    """The model cannot be found, built, or used with this data."""


class RunFolderError(AnybatchError):
    """The run folder cannot be used or written."""


class TrainingError(AnybatchError):
    """Training itself went wrong: its loss is no longer a number."""


@contextlib.contextmanager
def as_setting() -> Iterator[None]:
    """Convert a ValueError of the library in a block into the error of a setting."""
    try:
        yield
    except ValueError as error:
        raise SettingsError(f"{error}.") from error


def refuse_not_finite(loss: float, step: int, epoch: int) -> None:
    """Refuse a step with a loss that is not finite.

    Raises:
        TrainingError: naming the step.
    """
    if not math.isfinite(loss):
        raise TrainingError(
            f"the loss must be a finite number; got {loss} in step {step} of epoch {epoch}. The "
            "weights are those before that step; try a smaller --lr."
        )


ARGUMENTS = dict.fromkeys("micro_batch memory batchnorm offload states workspace device".split())
ARGUMENTS |= {"max_batch": None, "spill": None, "store": "spill"}
"""Arguments of the library, and the options that are called otherwise."""

NAME = f"({'|'.join(ARGUMENTS)})"
VALUE = r"""=(?:"([^"]*)"|'([^']*)'|(\.{3}|(?:[\w.]*\w)?))"""
CALLED = re.compile(rf"(?:anybatch\.)?\b(?:plan|Engine)\({NAME}{VALUE}\)")
ARGUMENT = re.compile(rf"\b{NAME}(?:{VALUE}| (?=>= ))")


def in_options(text: str) -> str:
    """Return a message of the library's with options for arguments: --memory 4GiB."""

    def option(found: re.Match[str]) -> str:
        name, *values = found.groups()
        words = [f"--{ARGUMENTS[name] or name}".replace("_", "-"), *filter(None, values)]
        return " ".join(words) + " " * found[0].endswith(" ")

    return ARGUMENT.sub(option, CALLED.sub(option, text))


class MissingExtraError(AnybatchError):
    """An optional package is needed here and is not installed."""


# Delay of Ctrl-C, and of a job scheduler's SIGTERM, until an indivisible change is complete.
#
# An optimizer changes one parameter after another, a checkpoint is written byte after byte. Python
# raises KeyboardInterrupt between any two lines of them, and SIGTERM ends the process there and
# then. Inside `terminable()` SIGTERM is an exception as Ctrl-C is; inside `unbroken()` both are
# noted, and handled when the block ends.

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception that every handler of Ctrl-C catches."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` in a block; in a thread other than the main one do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if before is not None:  # None: not set by Python, so Python cannot set it again
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Run a block to its end before Ctrl-C or SIGTERM takes effect.

    In a thread other than the main one, where Python delivers no signal, it does nothing.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with noted() as came:
        yield
    for late in came:
        handler = before[signal.Signals(late)]
        if callable(handler):
            handler(late, None)
        elif handler == signal.SIG_DFL:
            signal.raise_signal(late)


@contextlib.contextmanager
def noted() -> Iterator[list[int]]:
    """Suppress Ctrl-C and SIGTERM in a block; yield the signals that have arrived.

    In a thread other than the main one, where Python delivers no signal, it does nothing.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    ours = [number for number, handler in before.items() if handler is not None]
    for number in ours:
        signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield came
    finally:
        for number in ours:
            signal.signal(number, before[number])


def deaf() -> None:
    """Let this process, a reader of images, ignore both: the process that trains will end it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
