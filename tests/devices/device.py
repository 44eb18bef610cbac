"""Levers and gauges of the stand-in: its cap, its faults, what it has counted."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

COUNTED = (
    *("live", "peak", "held", "active_peak", "requested", "cap", "pinned", "launches"),
    *("deferred", "forced", "failures", "allocations", "workspaces"),
)
MOST_DEVICES = 4
CAP = 8 << 30
WORKSPACE = 8_519_680
"""Bytes that torch gives cuBLAS for each handle and stream, by default, before Hopper."""

FRAMES = 24
LAUNCHES = 1 << 14
"""Of the last so many launches, the stacks are kept."""

Stack = list[tuple[CodeType, int]]


@dataclass(frozen=True)
class Fault:
    """A race: what it is, and the stacks of both launches, innermost frame first."""

    text: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.text}\n  first:\n{self.first}\n  then:\n{self.second}"


class Device:
    """The stand-in of a process.

    Args:
        library: that was loaded.
    """

    most = MOST_DEVICES

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.standin_kernels.restype = ctypes.c_char_p
        self._faults: list[Fault] = []
        self._stacks: list[tuple[int, Stack]] = [(0, [])] * LAUNCHES
        self._devices = 1
        number = ctypes.c_uint64
        self._note = ctypes.CFUNCTYPE(None, number)(self._launched)
        self._tell = ctypes.CFUNCTYPE(None, ctypes.c_char_p, number, number)(self._found)
        self.restore()

    def restore(self) -> None:
        """Set every lever as it is at the beginning, and forget faults and counts."""
        self.watch()
        for index in range(MOST_DEVICES):
            self.synchronize(index)
            self.cap(CAP, index)
        self._library.standin_fail(ctypes.c_int64(-1), ctypes.c_int64(0))
        self._library.standin_interrupt(ctypes.c_int64(-1))
        self._library.standin_set_late(1)
        self._library.standin_clear_kernels()
        self.devices(1)
        self.workspace(WORKSPACE)
        self.clear_workspaces()
        for index in range(MOST_DEVICES):
            self.reset_peak(index)
        self.faults()

    def watch(self, *, stacks: bool = True) -> None:
        """Report races, with the stacks of both sides, which cost a few microseconds a kernel."""
        self._library.standin_tell(self._note if stacks else None, self._tell)

    def faults(self) -> list[Fault]:
        """Return the races that were found since the last call."""
        self._library.standin_tell_faults()
        found, self._faults = self._faults, []
        return found

    def statistics(self, index: int = 0) -> dict[str, int]:
        """Return bytes and counts, by the names of `COUNTED`."""
        values = (ctypes.c_int64 * len(COUNTED))()
        self._library.standin_statistics(index, values)
        return dict(zip(COUNTED, values, strict=True))

    def kernels(self) -> dict[str, int]:
        """Return how often each kernel was launched since `restore`."""
        lines = self._library.standin_kernels().decode().splitlines()
        return {name: int(count) for name, count in (line.split("\t") for line in lines)}

    def cap(self, count: int, index: int = 0) -> None:
        """Let a device have so many bytes."""
        self._library.standin_set_cap(index, ctypes.c_int64(count))

    def late(self, on: bool) -> None:
        """Have copies of pinned memory happen as late as they may, or at once."""
        self._library.standin_set_late(int(on))

    def fail(self, first: int, count: int = 1) -> None:
        """Have allocations fail: of those from now on, `count` from number `first` on."""
        self._library.standin_fail(ctypes.c_int64(first), ctypes.c_int64(count))

    def interrupt(self, after: int) -> None:
        """Send SIGINT to this process at the launch that comes after so many."""
        self._library.standin_interrupt(ctypes.c_int64(after))

    def workspace(self, count: int) -> None:
        """Let cuBLAS have so many bytes for each handle and stream; 0 for none."""
        self._library.standin_set_workspace(ctypes.c_int64(count))

    def clear_workspaces(self) -> None:
        """Free all workspaces."""
        self._library.standin_clear_workspaces()

    def devices(self, count: int) -> None:
        """Have so many devices."""
        self._devices = count
        self._library.standin_set_devices(count)

    def count(self) -> int:
        """Return how many devices there are."""
        return self._devices

    def current(self) -> int:
        """Return the index of the present device."""
        return int(self._library.standin_device())

    def set_current(self, index: int) -> None:
        """Make a device the present one."""
        self._library.standin_set_device(index)

    def stream(self, index: int) -> int:
        """Return the number of a device's present stream."""
        return int(self._library.standin_stream(index))

    def set_stream(self, index: int, stream: int) -> None:
        """Make a stream the present one of its device."""
        self._library.standin_set_stream(index, stream)

    def synchronize(self, index: int) -> None:
        """Wait for all streams of a device."""
        self._library.standin_synchronize(index)

    def reset_peak(self, index: int) -> None:
        """Let the peaks begin at what is allocated."""
        self._library.standin_reset_peak(index)

    def generator(self, index: int) -> torch.Generator:
        """Return the default generator of a device."""
        self._library.standin_hand_default(1)
        try:
            return torch.Generator(device=f"cuda:{index}")
        finally:
            self._library.standin_hand_default(0)

    def _launched(self, number: int) -> None:
        stack: Stack = []
        frame: Any = sys._getframe().f_back  # None on a thread of autograd's
        while frame is not None and len(stack) < FRAMES:
            stack.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        self._stacks[number % LAUNCHES] = number, stack

    def _found(self, text: bytes, first: int, second: int) -> None:
        self._faults.append(Fault(text.decode(), self._stack(first), self._stack(second)))

    def _stack(self, number: int) -> str:
        recorded, stack = self._stacks[number % LAUNCHES]
        if recorded != number:
            return "    (too long ago)"
        if not stack:
            return "    (a thread of autograd's)"
        return "\n".join(
            f"    {code.co_filename}:{line} in {code.co_qualname}" for code, line in stack
        )
