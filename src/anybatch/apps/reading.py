"""The mini-batches of an epoch that can be trained on, and what becomes of broken files.

A DataLoader that meets a broken file ends the training, hours in, with the traceback of a worker.
Here a broken file comes beside the samples that could be read (`views`): it ends the run in one
line that names it, or, where that was asked for, is said once, counted and left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from anybatch.apps.data import corrupt
from anybatch.apps.faults import DataError
from anybatch.apps.progress import Progress
from anybatch.apps.views import Batch, Loader


class Reading:
    """Reads mini-batches; `unreadable` holds the paths of all files left out so far."""

    def __init__(self, progress: Progress, *, skip_corrupt: bool) -> None:
        self.progress, self.skip_corrupt = progress, skip_corrupt
        self.unreadable: set[str] = set()

    def epoch(self, loader: Loader, number: int, skip: int = 0) -> Iterator[tuple[int, Batch]]:
        """Yield the mini-batches that have a sample, and how many are done with each.

        The first `skip` mini-batches are left out.

        Raises:
            DataError: at a broken file, or when there is no sample at all.
        """
        empty = not skip
        for done, batch in enumerate(loader.epoch(number, skip), skip + 1):
            if batch.unreadable and not self.skip_corrupt:
                raise corrupt(batch.unreadable)
            for found in batch.unreadable:
                if found.path not in self.unreadable:
                    self.unreadable.add(found.path)
                    self.progress.say(f"skipped {found.path}: {found.reason}")
            if len(batch.inputs):
                empty = False
                yield done, batch
        if empty:
            raise DataError(
                "no sample of an epoch could be read: all were skipped. Check the files."
            )
