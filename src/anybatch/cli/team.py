"""The processes that train one run together, as one of them sees them.

    torchrun --nproc-per-node=2 -m anybatch train ...

The engine makes the gradient that of the batch over all ranks. The command must still make it one
run. Rank 0 has the console, the clock and the run folder; the others follow it, and print nothing.
All ranks agree at two places, between two steps and between two acts of setting up: whether one of
them has failed, and whether a stop was requested.

    rank 0   read rows ──┐         step ──> log, checkpoint ──> read rows ──┐
    rank 1   read rows ──┴ agreed  step ─────────────────────> read rows ──┴ agreed

A signal is recorded during the run, and handled where all agree: the others could not distinguish a
rank that stops in the middle of a step from one that is lost.

With one process every method does nothing, or the same for one process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from anybatch.cli.devices import find_device
from anybatch.cli.faults import SettingsError, Terminated, TrainingError, as_setting, noted
from anybatch.cli.metrics import Metric
from anybatch.devices import choose_device, group_of, rank_device
from anybatch.errors import RankError

OVER = "anybatch/train/over"
PATIENCE = 60
"""Seconds that the others wait for rank 0 to write down how the run ended."""

EARLY = 5.0
"""Seconds that torchrun has to end a rank that has the same fault as rank 0."""

POLL = 0.05
"""Seconds between two polls."""

T = TypeVar("T")


class Team:
    """Ranks of a run; `Team()` is a single process.

    `rank`: of this process. `size`: how many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._came: list[int] | None = None
        self._made = False

    @classmethod
    def here(cls) -> Team:
        """Return those of this process's group, or those that torchrun has started with it."""
        if not dist.is_available():
            return cls()
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        if dist.is_torchelastic_launched():
            return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        return cls()

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    @property
    def leads(self) -> bool:
        """Whether this process has the console and the run folder."""
        return self.rank == 0

    def speaks(self) -> bool:
        """Return whether this process says why it ends: rank 0 does, where it can know.

        Before they know each other most faults are of all ranks; one that torchrun does not end,
        as it does when rank 0 has ended, has a fault of its own.
        """
        if self.leads or self._made or dist.is_initialized():
            return self.leads
        time.sleep(EARLY)
        return True

    def refuse(self, what: str) -> None:
        """Refuse a command that must be run by a single process.

        Raises:
            SettingsError: there are several.
        """
        if self.several:
            raise SettingsError(
                f"{what} must be run by one process; torchrun has started {self.size}. Start it "
                "without torchrun."
            )

    def device(self, name: str | None) -> str | None:
        """Return the name of this rank's device: of several GPUs the one of its local rank.

        Raises:
            SettingsError: one GPU is named for all.
        """
        if not self.several:
            return name
        with as_setting():
            return rank_device(name, int(os.environ.get("LOCAL_RANK", self.rank)))

    def meet(self, device: str | None) -> None:
        """Make the process group, if there are others and there is none; `device` is for all."""
        if not self.several or dist.is_initialized():
            return
        dist.init_process_group(choose_device(find_device(self.device(device))))
        self._made = True

    def __enter__(self) -> Team:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Destroy the process group, if `meet` has made it; rank 0 first.

        Were another to end before rank 0 has written the last checkpoint and said why the run has
        stopped, torchrun would end rank 0 too.
        """
        if not self._made:
            return
        with contextlib.suppress(RuntimeError):
            if error_type is not None:
                group_of().abandon()
            self._outstay()
        dist.destroy_process_group()

    def _outstay(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        if self.leads:
            store.set(OVER, "1")
            return
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and not store.check([OVER]):
            time.sleep(POLL)

    def gather(self, *numbers: float) -> list[list[float]]:
        """Return the numbers of every rank, in order.

        Raises:
            RankError: a rank is gone.
        """
        if not self.several:
            return [list(numbers)]
        rows = group_of().gather(torch.tensor(numbers, dtype=torch.float64))
        return [row.tolist() for row in rows]

    def objects(self, one: T) -> list[T]:
        """Return one picklable object of every rank, in order."""
        return group_of().objects(one) if self.several else [one]

    def together(self, run: Callable[[], T]) -> T:
        """Run a function that fails on all ranks if it fails on one; return its result here.

        Raises:
            RankError: it failed on another rank, and not on this one.
            KeyboardInterrupt: a signal has come to one of them.
        """
        if not self.several:
            return run()
        found: list[T] = []
        error: BaseException | None = None
        try:
            found.append(run())
        except (Exception, KeyboardInterrupt) as raised:
            error = raised
        if self._came is not None:
            self._agree(error, self._came)
        else:
            with noted() as came:
                self._agree(error, came)
        return found[0]

    def _agree(self, error: BaseException | None, came: list[int]) -> None:
        if isinstance(error, KeyboardInterrupt):
            came.append(signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
            error = None
        rows = self.gather(error is not None, max(came, default=0))
        if any(failed for failed, _ in rows):
            said = self.objects(None if error is None else f"{type(error).__name__}: {error}")
            if error is not None:
                raise error
            words = "; ".join(f"rank {r}: {one}" for r, one in enumerate(said) if one is not None)
            raise RankError(f"all ranks must be able to go on, and one cannot ({words})")
        signals = [int(number) for _, number in rows if number]
        if signals:
            raise _interrupt(signals)

    def from_first(self, run: Callable[[], T]) -> T:
        """Run a function on rank 0, and return its result on every rank.

        Raises:
            RankError: it failed there.
        """
        found: Any = self.together(lambda: run() if self.leads else None)
        shared: T = group_of().broadcast_object(found, 0) if self.several else found
        return shared

    @contextlib.contextmanager
    def calm(self) -> Iterator[None]:
        """Record Ctrl-C and SIGTERM until all ranks agree to stop; do nothing with one rank."""
        if not self.several:
            yield
            return
        with noted() as came:
            self._came = came
            try:
                yield
            except RankError:
                if came and not self.leads:
                    raise _interrupt(came) from None  # what rank 0 says, the status tells too
                raise
            finally:
                self._came = None

    def heed(self) -> None:
        """Let rank 0 stop within a step, if a signal was recorded; the engine informs the others.

        Raises:
            KeyboardInterrupt: it was.
        """
        if self._came and self.leads:
            raise _interrupt(self._came)

    def seed(self, seed: int, step: int) -> None:
        """Seed each rank but the first, as a function of seed, rank and step only.

        The first goes on as one process would. So a run that is resumed needs no RNG state but its.
        """
        if self.leads:
            return
        drawn = int(np.random.SeedSequence((seed, self.rank, step)).generate_state(1)[0])
        torch.manual_seed(drawn)
        random.seed(drawn)
        np.random.seed(drawn)

    def begin(self, model: nn.Module, seed: int, step: int) -> None:
        """Let all ranks begin a step, or a test, with rank 0's buffers, and draw as `seed` says.

        Statistics of micro-batches, and other state stored by a forward, are each rank's own.
        """
        self.seed(seed, step)
        if self.several:
            same_buffers(model)

    def rank_metric(self, total: Metric, make: Callable[[], Metric]) -> Metric:
        """Return the metric in which this rank counts: `total` itself in a single process."""
        return make() if self.several else total

    def add(self, total: Metric, local_metric: Metric) -> None:
        """Add the counts of every rank to `total`, on every rank."""
        if local_metric is not total:
            rows = self.gather(*local_metric.counts())
            one, other = (int(sum(column)) for column in zip(*rows, strict=True))
            was = total.counts()
            total.go_on_from((was[0] + one, was[1] + other))


def _interrupt(signals: list[int]) -> KeyboardInterrupt:
    return Terminated() if signal.SIGTERM in signals else KeyboardInterrupt()


SINGLE_PROCESS = Team()


# One model on every rank: the same weights in the beginning, the same buffers in every step.
#
# DistributedDataParallel sends the weights of rank 0 to all and so hides a model that draws them
# from a generator of its own; such a run cannot be repeated. Here it is found. Buffers are sent, as
# DistributedDataParallel does: a forward may store statistics of its rows in them.


def refuse_unequal(model: nn.Module) -> None:
    """Refuse a model that is not the same on every rank.

    Raises:
        TrainingError: naming the ranks where it differs from that of rank 0.
    """
    rows = group_of().gather(torch.tensor([_checksum(model)], dtype=torch.float64))
    others = [f"rank {rank}" for rank, row in enumerate(rows) if not torch.equal(row, rows[0])]
    if others:
        raise TrainingError(
            f"every rank must begin with the same weights; those of {', '.join(others)} are not "
            "those of rank 0. Let the model draw them from the generators of torch, Python or "
            "numpy, which --seed sets alike."
        )


def same_buffers(model: nn.Module) -> None:
    """Give all ranks the buffers of rank 0, in one piece for each dtype."""
    group = group_of()
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for buffer in model.buffers():
        kinds.setdefault(buffer.dtype, []).append(buffer.detach())
    for buffers in kinds.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers]).to(group.device)
        sizes = [buffer.numel() for buffer in buffers]
        pieces = torch.split(group.sent(flat, 0), sizes)
        for buffer, piece in zip(buffers, pieces, strict=True):
            if group.rank != 0:
                buffer.copy_(piece.reshape(buffer.shape))


def _checksum(model: nn.Module) -> float:
    """Return a number of 48 bits made of all parameters and buffers."""
    found = hashlib.blake2b(digest_size=6)
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        if isinstance(tensor, Tensor):
            found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return float(int.from_bytes(found.digest(), "big"))
