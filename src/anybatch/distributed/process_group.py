"""Process group with collectives that end: in a result, or in an error that names the lost rank.

A collective waits for all ranks. If one process has died, its direct neighbours find a closed
connection; the other ranks wait on, for half an hour by default. So every wait reads the group's
store once a second, and a rank whose collective broke reports it there.

    rank 0 ── all-reduce ──> rank 1 (killed)     connection closed: reports it in the store
    rank 2 ── all-reduce ──> rank 0              waits; a second later reads the store; ends too

Ring all-reduce and all-gather are those of gloo and NCCL (AGBN, Algorithm 6).
"""

from __future__ import annotations

import contextlib
import pickle
import weakref
from datetime import timedelta
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anybatch.core.accelerators import carrier
from anybatch.errors import RankError

POLL_INTERVAL = timedelta(seconds=1)
"""How long a wait lasts before it checks whether a rank is reported as gone."""

ROLL = timedelta(seconds=5)
"""How long the others have to say that they are there, once a collective has broken."""

FEW = 2**15
"""Numbers of all ranks up to which a gather takes less time than a sum, which goes around twice."""

GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers into one tensor, by the name that it has since torch 2.13, or by that before."""

LATER = timedelta(milliseconds=100)
"""How long each has when that time is over."""


class Group:
    """The ranks that share a batch; `group_of` returns it.

    A process group that is still held when Python ends ends the process with an error, so only its
    creators hold it.

    Args:
        handle: a process group of ``torch.distributed``.

    Attributes:
        orders: engine -> its number.
        waited: seconds of the host in which this rank has waited for collectives.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = weakref.ref(handle)
        self.rank, self.size = dist.get_rank(handle), dist.get_world_size(handle)
        self._name = handle.group_name  # others write to the same store
        self.device = carrier(str(dist.get_backend_config(handle)))
        self.broken = False
        self.waited = 0.0
        self._incident = 0
        self._numbers = count(1)
        self.orders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @property
    def handle(self) -> Any:
        """The process group."""
        return self._handle()

    def number(self, who: Any) -> None:
        """Assign a number, the same on all ranks, to an engine that has made its first step.

        Args:
            who: the engine.
        """
        self.orders[who] = next(self._numbers)

    def begin(self) -> None:
        """Count a step, so that reports of a broken one do not affect the next.

        Raises:
            RankError: a collective has broken before.
        """
        if self.broken:
            raise RankError(
                "all ranks must be alive, and one was lost in an earlier step: start all again, "
                "from the last checkpoint"
            )
        self._incident += 1

    def gather(self, part: Tensor) -> list[Tensor]:
        """Return the tensor `part` of each rank, in order; all have one shape and dtype."""
        part = part.to(self.device).contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self.wait(self._started(dist.all_gather, [*map(bits, parts)], bits(part)))
        return parts

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum over all ranks, in a new tensor or in `part`."""
        part = part.to(self.device).contiguous()
        self.wait(self.start_sum(part))
        return part

    def start_sum(self, part: Tensor) -> Any:
        """Begin to sum `part`, a contiguous tensor, in place; return the work for `wait`."""
        return self._started(dist.all_reduce, part)

    def start_gather(self, gathered: Tensor, part: Tensor, handle: Any) -> Any:
        """Begin to gather parts of one size, over a part of the ranks; return as `start_sum`.

        Args:
            gathered: contiguous, for the parts in order.
            part: contiguous.
            handle: the process group of those that take part.
        """
        return self._started(GATHER, gathered, part, handle=handle)

    def sent(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of the rank `source`, in the memory of `tensor`."""
        self.wait(self._started(partial(dist.broadcast, group_src=source), bits(tensor)))
        return tensor

    def objects(self, one: Any) -> list[Any]:
        """Return `one`, a picklable object, of each rank, in order."""
        return self.unpacked(packed(one))

    def unpacked(self, data: Tensor) -> list[Any]:
        """Return the object of each rank, in order, from `data`, its bytes as `packed` has them."""
        sizes = [int(size) for size in self.gather(torch.tensor([len(data)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        rows = self.gather(padded)
        return [
            pickle.loads(row[:size].cpu().numpy().tobytes())
            for row, size in zip(rows, sizes, strict=True)
        ]

    def broadcast_object(self, one: Any, source: int) -> Any:
        """Return `one`, a picklable object, of the rank `source`; the others' does not matter."""
        data = torch.frombuffer(bytearray(pickle.dumps(one)), dtype=torch.uint8)
        size = int(self.gather(torch.tensor([len(data)]))[source])
        there = data if self.rank == source else torch.empty(size, dtype=torch.uint8)
        sent = self.sent(there.to(self.device), source)
        return pickle.loads(sent.cpu().numpy().tobytes())

    def wait(self, work: Any) -> None:
        """Wait for a collective.

        Args:
            work: as `start_sum` or `start_gather` returns it.

        Raises:
            RankError: a rank is gone.
        """
        start = perf_counter()
        while True:
            try:
                work.wait(POLL_INTERVAL)
            except RuntimeError as error:
                if work.is_completed() or self._reported():
                    raise self._lost(error) from error
            else:
                self.waited += perf_counter() - start
                return

    def abandon(self) -> None:
        """Notify the other ranks that this one will not join their collectives."""
        self.broken = True
        with contextlib.suppress(RuntimeError):
            _store().set(self._key("any"), "1")

    def _started(self, collective: Any, *args: Any, handle: Any = None) -> Any:
        try:
            return collective(*args, group=handle or self.handle, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _key(self, name: object) -> str:
        return f"anybatch/lost/{self._name}/{self._incident}/{name}"

    def _reported(self) -> bool:
        """Return whether another rank has reported a broken collective in this step."""
        try:
            return bool(_store().check([self._key("any")]))
        except RuntimeError:
            return True

    def _lost(self, error: RuntimeError) -> RankError:
        """Return an error that names the lost ranks: those that do not answer in time."""
        self.broken = True
        gone = self._gone()
        who = ", ".join(f"rank {rank}" for rank in gone) or "a rank"
        return RankError(
            f"all ranks must be alive until the step ends, and {who} of {self.size} is gone "
            f"({_first_line(error)}): this step was undone. Read its log, and start all again from "
            "the last checkpoint"
        )

    def _gone(self) -> list[int]:
        """Return the ranks that do not say in time that they are there."""
        gone: list[int] = []
        for rank in range(self.size):
            try:
                store = _store()
                store.set(self._key("any"), "1")
                store.set(self._key(self.rank), "1")
                store.wait([self._key(rank)], LATER if gone else ROLL)
            except RuntimeError:
                gone.append(rank)
        return gone


def bits(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes, in its own memory: backends lack int16 and others."""
    return tensor.view(-1).view(torch.uint8)


def packed(one: Any) -> Tensor:
    """Return a picklable object as bytes."""
    return torch.frombuffer(bytearray(pickle.dumps(one)), dtype=torch.uint8)


_GROUPS: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()


def group_of(handle: Any = None) -> Group:
    """Return the ranks of a process group.

    Args:
        handle: of ``torch.distributed``. Default None: the group of all ranks.
    """
    found = dist.group.WORLD if handle is None else handle
    if found not in _GROUPS:
        _GROUPS[found] = Group(found)
    return _GROUPS[found]


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
