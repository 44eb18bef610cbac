"""Message on a terminal about a measurement that takes long.

The first pass of a network through `anybatch.convolutions` may take minutes without output. So
after a while one line shows the current kernel and algorithm, and is erased when measuring is over.
Without a terminal or a notebook there is no output.
"""

from __future__ import annotations

import sys
from shutil import get_terminal_size
from time import perf_counter
from typing import TextIO

from anybatch.conv.problem import Problem

PATIENCE = 2.0
"""Seconds of measuring after which something is said."""

PAUSE = 1.0
"""Seconds without a measurement after which a new wait begins."""


class Telling:
    """Progress line on a terminal: call it before each measurement.

    Args:
        on: say anything at all.
        stream: where. Default None: the error stream, of a terminal or a notebook.
    """

    def __init__(self, *, on: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._on = on and (self._stream.isatty() or "ipykernel" in sys.modules)
        self._begin = self._last = 0.0
        self._count = 0
        self._shown = False

    def __call__(self, problem: Problem, size: int, algorithm: str) -> None:
        """Record the next measurement, and show it if measuring takes long."""
        if not self._on:
            return
        now = perf_counter()
        if now - self._last > PAUSE:
            self._begin = now
        self._last, self._count = now, self._count + 1
        if now - self._begin > PATIENCE:
            self._show(f"measuring convolutions, {self._count}: {problem}, {algorithm}@{size}")

    def over(self) -> None:
        """Remove the line: nothing is measured for now."""
        if self._shown:
            self._stream.write("\r" + " " * _width() + "\r")
            self._stream.flush()
            self._shown = False

    def _show(self, text: str) -> None:
        self._shown = True
        width = _width()
        self._stream.write(f"\r{text[:width]:<{width}}")
        self._stream.flush()


def _width() -> int:
    """Return the letters of a line that do not make a terminal begin another one."""
    return get_terminal_size().columns - 1
