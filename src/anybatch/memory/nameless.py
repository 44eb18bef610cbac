"""A file without a name: made, written and read at a place, on systems that know less than Linux.

Linux can unlink an open file, read and write at an offset without moving a pointer that threads
share, and bypass the page cache. Missing features of a system are replaced:

    name        unlinked while open         Windows: deleted by the system when it is closed
    at a place  pwrite, preadv              else one thread at a time: seek, then read or write
    past cache  O_DIRECT                    else through the page cache
    room        of the file                 Windows: of its folder

Each is looked up when it is needed, so that a test can remove it.

Source: the availability notes of Python's `os` and `tempfile`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

BY_FILE = os.name == "posix"
"""Whether the system reports the free space of an open file; else that of its folder is used."""

_SEEKING = threading.Lock()


def nameless(folder: Path | None, *, direct: bool) -> tuple[int, bool]:
    """Return a descriptor of a new private file, and whether it bypasses the page cache.

    Args:
        folder: where it is; None is the system's folder for temporary files.
        direct: past the page cache, where the system can.

    Raises:
        OSError: the folder cannot be written to.
    """
    goes_when_closed = getattr(os, "O_TEMPORARY", 0)
    descriptor, path = tempfile.mkstemp(prefix="anybatch-", dir=folder)
    if goes_when_closed:  # an open file keeps its name there
        flags = os.O_RDWR | goes_when_closed | getattr(os, "O_BINARY", 0)
        os.close(descriptor)
        return os.open(path, flags), False
    try:
        past = past_the_cache(path) if direct else None
    finally:
        Path(path).unlink()
    if past is None:
        return descriptor, False
    os.close(descriptor)
    return past, True


def past_the_cache(path: str) -> int | None:
    """Return a descriptor that does not use the page cache, None where the system has none."""
    flag = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flag) if flag else None
    except OSError:  # a file system without it
        return None


def write_at(descriptor: int, view: memoryview, begin: int) -> int:
    """Write bytes from `begin` on, and return the number that was written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, view, begin)
    with _SEEKING:
        os.lseek(descriptor, begin, os.SEEK_SET)
        return os.write(descriptor, view)


def read_at(descriptor: int, view: memoryview, begin: int) -> int:
    """Fill with the bytes from `begin` on, and return their number."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], begin)
    with _SEEKING:
        os.lseek(descriptor, begin, os.SEEK_SET)
        came = os.read(descriptor, len(view))
    view[: len(came)] = came
    return len(came)


def left_for(descriptor: int, folder: Path | None) -> int:
    """Return the bytes that the file system of a file has left."""
    return shutil.disk_usage(descriptor if BY_FILE else folder or tempfile.gettempdir()).free
