"""Files of a run, each complete or absent, and the error where one cannot be written.

`torch.save` to the final name leaves half a file when the disk is full or the process dies. Here a
file is written next to its place, forced to the disk, and then takes the old one's name in one step
(os.replace), so the old one is complete until the new one is.

    .NAME.part ──written, forced to the disk──> NAME
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from anybatch.cli.faults import RunFolderError

CHECKPOINT = "checkpoint.pt"
"""Files from which a run is resumed."""


class Files:
    """The files in the run folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def replace(self, name: str, write: Callable[[IO[bytes]], object]) -> None:
        """Write a file under a temporary name, then give it its own.

        Raises:
            RunFolderError: it cannot be written; the existing one is complete.
        """
        temporary = self.path / f".{name}.part"
        try:
            with self.failing(name):
                with temporary.open("wb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self.path / name)
                _sync_folder(self.path)
        finally:
            temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def failing(self, name: str) -> Iterator[None]:
        """Convert the system's error in a block into one that names the remedy for `name`."""
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch.save wraps the system's error
            found: BaseException | None = error
            while found is not None and not isinstance(found, OSError):
                found = found.__context__
            reason = found.strerror if isinstance(found, OSError) else str(error)
            raise RunFolderError(
                f"{name} cannot be written to {self.path}: {reason}. {self._what_is_there()}"
            ) from error

    def _what_is_there(self) -> str:
        if not (self.path / CHECKPOINT).exists():
            return "No step is kept yet; make room, then start the run again."
        return f"What was written before is whole; make room, then go on with --resume {self.path}."


def _sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk: that a file took another's name is one of them."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
