"""One line while planning or an inspection lasts over a second: its part, and how to skip it.

    anybatch: planning the first step, 4 s: dry run of 16 samples (micro_batch= skips this)

It stands on a terminal or in a notebook as long as the work lasts, and is gone when it has ended.
Elsewhere it goes to the log of the name "anybatch", at level INFO. That log switches it off:

    logging.getLogger("anybatch").setLevel(logging.WARNING)

No thread runs beside the work: the clock is read between kernels.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TextIO

LOG = logging.getLogger("anybatch")
"""The log of this package."""

AFTER = 1.0
"""Seconds of work after which the line is shown."""

EVERY = 0.5
"""Seconds after which it is written again on a terminal."""

LOGGED = 10.0
"""Seconds after which it goes to the log again."""

KERNELS = 64
"""Kernels between two looks at the clock."""


class Status:
    """Status of the work that is under way.

    Attributes:
        work: in words; nothing where none is.
        part: of it, in words.
        skip: how to skip it, in words.
    """

    def __init__(self) -> None:
        self.work = self.part = self.skip = ""
        self._begin = self._next = 0.0
        self._shown = False
        self._kernels = 0

    @contextmanager
    def of(self, work: str, skip: str) -> Iterator[None]:
        """Show `work` while the body lasts, if it is long; in other work it is a part of that."""
        if self.work:
            self.at(work)
            yield
            return
        self.work, self.skip, self.part = work, skip, ""
        self._begin = monotonic()
        self._next = self._begin + AFTER
        try:
            yield
        finally:
            self._erase()
            self.work = self.part = self.skip = ""

    def at(self, part: str) -> None:
        """Say which part of the work begins."""
        if self.work:
            self.part = part
            self._check()

    def tick(self) -> None:
        """Read the clock after some kernels."""
        if self.work:
            self._kernels = (self._kernels + 1) % KERNELS
            if not self._kernels:
                self._check()

    def _check(self) -> None:
        now = monotonic()
        if now < self._next:
            return
        terminal = _terminal()
        self._next = now + (EVERY if terminal else LOGGED)
        part = f": {self.part}" if self.part else ""
        line = f"anybatch: {self.work}, {now - self._begin:.0f} s{part} ({self.skip})"
        if not terminal:
            LOG.info("%s", line.removeprefix("anybatch: "))
        elif LOG.level <= logging.INFO and not LOG.disabled:
            width = shutil.get_terminal_size().columns - 1
            _write(f"\r{line[:width]:<{width}}")
            self._shown = True

    def _erase(self) -> None:
        if self._shown:
            width = shutil.get_terminal_size().columns - 1
            _write("\r" + " " * width + "\r")
        self._shown = False


def _terminal() -> bool:
    """Return whether a line can be written over: on a terminal or in a notebook, by one rank."""
    stream = _stream()
    if os.environ.get("RANK", "0") != "0":
        return False
    return "ipykernel" in sys.modules or bool(stream and stream.isatty())


def _stream() -> TextIO | None:
    """Return the stream of messages; None in a process without one."""
    return sys.stderr


def _write(text: str) -> None:
    stream = _stream()
    if stream is not None:
        stream.write(text)
        stream.flush()


STATUS = Status()
"""That of this process."""


def say(line: str) -> None:
    """Write a line that remains: to the log, and on a terminal where that shows nothing."""
    if _terminal() and not LOG.isEnabledFor(logging.INFO) and LOG.level <= logging.INFO:
        _write(f"anybatch: {line}\n")
    else:
        LOG.info("%s", line)
