"""Mini-batches of an epoch that can be trained on, and the treatment of broken files.

A DataLoader that reads a broken file ends the training, hours in, with the traceback of a worker.
Here a broken file is returned with the samples that could be read (`views`): it ends the run in one
line that names it, or, on request, is reported once, counted and skipped.

Of several ranks each reads its own rows. A mini-batch counts where any rank has a sample: the
others then join the step with none. Unreadable files of one rank are reported to all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, count

from anybatch.cli.data import corrupt
from anybatch.cli.faults import DataError, SettingsError
from anybatch.cli.progress import Progress
from anybatch.cli.team import SINGLE_PROCESS, Team
from anybatch.cli.views import LoadedBatch, Loader


class Reading:
    """Reads mini-batches; `unreadable` holds the paths of all files left out so far."""

    def __init__(
        self, progress: Progress, *, skip_corrupt: bool, team: Team = SINGLE_PROCESS
    ) -> None:
        self.progress, self.skip_corrupt, self.team = progress, skip_corrupt, team
        self.unreadable: set[str] = set()

    def epoch(
        self, loader: Loader, number: int, skip: int = 0
    ) -> Iterator[tuple[int, LoadedBatch]]:
        """Yield the mini-batches that have a sample, and how many are done with each.

        The first `skip` mini-batches are left out.

        Raises:
            DataError: at a broken file, or when there is no sample at all.
            RankError: the same, on another rank.
        """
        empty = not skip
        batches = loader.epoch(number, skip)
        for done in count(skip + 1):
            batch = self.team.together(partial(self._next, batches))
            if batch is None:
                break
            if self._share_unreadable(batch):
                empty = False
                yield done, batch
        if empty:
            raise DataError(
                "no sample of an epoch could be read: all were skipped. Check the files."
            )

    def first(self, loader: Loader, number: int) -> LoadedBatch:
        """Return the first mini-batch of an epoch of which every rank has a sample.

        Raises:
            SettingsError: there is none.
        """
        for _, batch in self.epoch(loader, number):
            if all(samples for [samples] in self.team.gather(len(batch.inputs))):
                return batch
        raise SettingsError(
            f"every rank must have a sample to plan with; {self.team.size} ranks share a "
            "mini-batch. Use a larger --batch-size, fewer ranks, or --micro-batch without "
            "--memory, which plans nothing."
        )

    def _next(self, batches: Iterator[LoadedBatch]) -> LoadedBatch | None:
        batch = next(batches, None)
        if batch is not None and batch.unreadable and not self.skip_corrupt:
            raise corrupt(batch.unreadable)
        return batch

    def _share_unreadable(self, batch: LoadedBatch) -> bool:
        """Share the unreadable files with all ranks; return whether any rank has a sample."""
        new = [(b.path, b.reason) for b in batch.unreadable if b.path not in self.unreadable]
        rows = self.team.gather(len(batch.inputs), len(new))
        if any(broken for _, broken in rows):
            for path, reason in dict.fromkeys(chain.from_iterable(self.team.objects(new))):
                self.unreadable.add(path)
                self.progress.say(f"skipped {path}: {reason}")
        return any(samples for samples, _ in rows)
