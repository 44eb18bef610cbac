"""A memory cgroup, version 1 or 2: the system kills what holds more, files in memory included.

Only who may make one can measure in it; elsewhere the results say that nobody could.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
LIMITS = ("memory.limit_in_bytes", "memory.max")
PEAKS = ("memory.max_usage_in_bytes", "memory.peak")


class Group:
    """A group of processes with one limit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def enter(self) -> None:
        """Move this process into it; its children are in it too."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int:
        """Return the most bytes that it has held."""
        found = next(self.path / name for name in PEAKS if (self.path / name).exists())
        return int(found.read_text())


@contextmanager
def group(limit: int) -> Iterator[Group | None]:
    """Make a group of at most `limit` bytes; None where that is not allowed."""
    path = next((p for root in ROOTS if (p := _made(root, limit)) is not None), None)
    try:
        yield None if path is None else Group(path)
    finally:
        if path is not None:
            path.rmdir()


def _made(root: Path, limit: int) -> Path | None:
    path = root / f"anybatch-{os.getpid()}"
    try:
        path.mkdir()
    except OSError:
        return None
    for name in LIMITS:
        if (path / name).exists():
            (path / name).write_text(str(limit))
            return path
    path.rmdir()
    return None
