"""Earlier run under `--overwrite`: set aside, and removed only after a step of the new run.

A run that is wrong (no such model, a batch that does not fit) fails before its first step. Were the
old files removed at the start, a mistyped word would cost a trained model. They are renamed into a
folder next to them, which costs nothing and loses nothing, and either removed or renamed back.

    RUN/.earlier.moving     on its way in or out: what lies here and in RUN is one run
    RUN/.earlier            complete; what lies in RUN has not taken a step
    RUN/.earlier.removing   of no more use

A folder's own name changes in one step (os.replace), so a process that is killed at any point
leaves one of these three, and the next run with `--overwrite` continues from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


class Earlier:
    """Files of an earlier run in the folder `path`: those with a name that `ours` accepts."""

    def __init__(self, path: Path, ours: Callable[[str], bool]) -> None:
        self.path, self.ours = path, ours
        self._complete = path / ".earlier"
        self._moving = path / ".earlier.moving"
        self._removing = path / ".earlier.removing"

    def set_aside(self) -> None:
        """Move the run in the folder aside; one without a step, of a killed process, is removed."""
        shutil.rmtree(self._removing, ignore_errors=True)
        if self._moving.exists():
            self._move_back()
        if self._complete.exists():
            self.remove_new()
        elif any(self.found()):
            self._moving.mkdir()
            for file in list(self.found()):
                file.replace(self._moving / file.name)
            self._moving.replace(self._complete)

    def restore(self) -> None:
        """Put the earlier run, if there is one, in the place of the new one."""
        if self._complete.exists():
            self.remove_new()
            self._complete.replace(self._moving)
            self._move_back()

    def drop(self) -> None:
        """Remove the earlier run for good."""
        if self._complete.exists():
            self._complete.replace(self._removing)
            shutil.rmtree(self._removing)

    def waits(self) -> bool:
        """Return whether an earlier run is set aside."""
        return self._complete.exists()

    def remove_new(self) -> None:
        """Remove the files of the run in the folder."""
        for file in list(self.found()):
            file.unlink()

    def found(self) -> Iterator[Path]:
        """Yield the files of the run in the folder."""
        return (at for at in self.path.iterdir() if self.ours(at.name))

    def _move_back(self) -> None:
        for file in self._moving.iterdir():
            file.replace(self.path / file.name)
        self._moving.rmdir()
