"""One process at a time in a run folder.

Two processes that write one run folder mix their lines and overwrite each other's checkpoint. A
file that merely says "in use" remains after `kill -9`. A lock of the system's ends with the
process. It is a record lock (fcntl's lockf): one of flock's would live on in the processes that
read images, which are forked from this one and outlive it for some seconds.

The file is removed when the run ends. Another process may have opened it just before, so a process
that gets the lock checks that the name still belongs to the locked file.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from anybatch.cli.faults import RunFolderError

if sys.platform != "win32":
    import fcntl

NAME = ".lock"


class Lock:
    """Lock of the run folder `path`: `take` acquires it, `release` frees it."""

    def __init__(self, path: Path) -> None:
        self.path = path / NAME
        self._file: int | None = None

    def take(self) -> None:
        """Take the lock.

        Raises:
            RunFolderError: when another living process has it.
        """
        if sys.platform == "win32" or self._file is not None:
            return
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.read(file, 20).decode(errors="replace")
                os.close(file)
                if not isinstance(error, BlockingIOError | PermissionError):
                    raise
                raise RunFolderError(
                    f"{self.path.parent} must not be in use; process {owner or 'unknown'} is "
                    "training in it. Wait for its end, or stop it."
                ) from error
            if self._is_named(file):
                self._file = file
                with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
                    os.ftruncate(file, 0)
                    os.write(file, str(os.getpid()).encode())
                return
            os.close(file)

    def release(self) -> None:
        """Give the lock back, if it is held, and remove its file."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _is_named(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self.path.stat())
        except FileNotFoundError:
            return False
