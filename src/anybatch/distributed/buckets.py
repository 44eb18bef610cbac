"""Pieces of gradients, summed over ranks in a fixed order, each once it is complete.

Backward completes the gradients of the last layers first. A sum that waits for the end of backward
leaves the link idle until then. torch's DistributedDataParallel sends earlier, and a rank that
fails in the middle leaves the others waiting. Here all ranks agree on the pieces before, so a rank
that fails sends zeros in place of its remaining ones, and raises its flag in the next collective.

    backward of the last micro-batch:   layer 4   layer 3   layer 2   layer 1
    on the wire:                               [4 and 3]           [2]     [1]   then: all fine?

A large gradient is a piece of its own, small ones are copied into one piece. Sent during backward,
a piece replaces its gradients, so no more than one piece is held in addition.

Source: the order and the pieces are those of PyTorch Distributed (Li et al., 2020, section 3.2.3).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybatch.core.hooks import service
from anybatch.core.transaction import uninterrupted
from anybatch.distributed.local_batch import Take
from anybatch.distributed.process_group import Group

SMALL = 2**18
"""Elements up to which a gradient goes with others, in pieces of no more than four times that."""

NUMBERS = 2**20
"""A digest is below this."""


class _Sent(NamedTuple):
    """Piece in transit: the numbers that are summed, and the work for `Group.wait`."""

    numbers: Tensor
    work: Any


class Pieces:
    """Sums of gradients over ranks.

    Args:
        group: the ranks.
        parameters: of the step, the same in the same order on every rank.
        places: those of them whose gradients are summed, by place.

    Attributes:
        contributed: for each gradient in flight, whether this rank had one.
    """

    def __init__(self, group: Group, parameters: Sequence[Tensor], places: Sequence[int]) -> None:
        self._group, self._parameters = group, parameters
        self._pieces = _divided(parameters, places)
        self._sent: list[_Sent] = []
        self.contributed: dict[int, bool] = {}

    @property
    def digest(self) -> int:
        """A positive checksum of these pieces."""
        said = [[(at, *_form(self._parameters[at])) for at in piece] for piece in self._pieces]
        return 1 + zlib.crc32(repr(said).encode()) % (NUMBERS - 1)

    @property
    def begun(self) -> bool:
        """Whether a piece is on its way."""
        return bool(self._sent)

    @contextmanager
    def during(self, take: Take) -> Iterator[None]:
        """Send every piece that a backward inside the body completes."""
        missing = [set(piece) for piece in self._pieces]

        def ready(place: int, piece: int, _: Tensor) -> None:
            missing[piece].discard(place)
            while len(self._sent) < len(missing) and not missing[len(self._sent)]:
                self._send_next(take)

        hooks = [
            self._parameters[at].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                service(partial(ready, at, k))
            )
            for k, piece in enumerate(self._pieces)
            for at in piece
            if self._parameters[at].requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def send(self, totals: Sequence[Tensor | None]) -> None:
        """Send the pieces that are not yet sent."""
        places = {id(parameter): at for at, parameter in enumerate(self._parameters)}
        while len(self._sent) < len(self._pieces):
            self._send_next(lambda parameters: [totals[places[id(p)]] for p in parameters])

    def give_up(self) -> None:
        """Send zeros for the pieces that are not yet sent, and wait for all pieces.

        Raises:
            RankError: a rank is gone.
        """
        while len(self._sent) < len(self._pieces):
            self._send_next(lambda parameters: [None] * len(parameters))
            self._group.wait(self._sent[-1].work)
        for _, work in self._sent:
            self._group.wait(work)

    def sums(self) -> Iterator[tuple[int, Tensor]]:
        """Wait for each piece, and yield (place, sum) of each gradient in it.

        Raises:
            RankError: a rank is gone.
        """
        for piece in self._pieces:
            numbers, work = self._sent.pop(0)
            self._group.wait(work)
            sizes = [_reals(self._parameters[at]) for at in piece]
            parts = torch.split(numbers.reshape(-1), sizes)
            for at, part in zip(piece, parts, strict=True):
                yield at, _as(self._parameters[at], part if len(piece) == 1 else part.clone())
            del numbers, work, parts, part
        self._pieces = []

    def _send_next(self, take: Take) -> None:
        piece = self._pieces[len(self._sent)]
        parameters = [self._parameters[at] for at in piece]
        with torch.no_grad():
            totals = take(parameters)
            self.contributed |= {at: t is not None for at, t in zip(piece, totals, strict=True)}
            each = [dense(*pair).reshape(-1) for pair in zip(parameters, totals, strict=True)]
            del totals
            numbers = each[0] if len(each) == 1 else torch.cat(each)
            del each
            numbers = numbers.to(self._group.device)
            with uninterrupted():
                self._sent.append(_Sent(numbers, self._group.start_sum(numbers)))


def copied_bytes(parameters: Sequence[Tensor]) -> int:
    """Return the bytes of the largest piece, which briefly exists next to its originals."""
    largest = 0
    for piece in _divided(parameters, range(len(parameters))):
        forms = [_form(parameters[at]) for at in piece]
        largest = max(largest, sum(count * dtype.itemsize for count, dtype in forms))
    return largest


def small_bytes(parameters: Sequence[Tensor]) -> int:
    """Return the bytes of all copied gradients: sent late, they exist next to the copies."""
    forms = [_form(parameter) for parameter in parameters if _reals(parameter) <= SMALL]
    return sum(count * dtype.itemsize for count, dtype in forms)


def dense(parameter: Tensor, total: Tensor | None) -> Tensor:
    """Return a gradient, in real numbers, in the order in which all ranks lay it out."""
    _, dtype = _form(parameter)
    if total is None:
        total = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    full = (total.to_dense() if total.is_sparse else total).to(dtype).contiguous()
    return torch.view_as_real(full) if full.is_complex() else full


def _form(parameter: Tensor) -> tuple[int, torch.dtype]:
    """Return the element count and dtype of a sum: half precision is summed in float32."""
    return parameter.numel(), torch.float32 if parameter.itemsize < 4 else parameter.dtype


def _reals(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _as(parameter: Tensor, numbers: Tensor) -> Tensor:
    shape = parameter.shape
    if parameter.is_complex():
        return torch.view_as_complex(numbers.reshape(*shape, 2)).to(parameter.device)
    return numbers.reshape(shape).to(parameter.device)


def _divided(parameters: Sequence[Tensor], places: Sequence[int]) -> list[list[int]]:
    """Return places, those of small ones together, in the order in which backward completes them.

    Backward is taken to come to parameters in reverse order.
    """
    found: list[list[int]] = []
    available: dict[torch.dtype, int] = {}
    last: dict[torch.dtype, list[int]] = {}
    for at in sorted(places, reverse=True):
        size, (_, dtype) = _reals(parameters[at]), _form(parameters[at])
        real = dtype.to_real()
        if size > SMALL:
            found.append([at])
            continue
        if available.get(real, -1) < size:
            last[real], available[real] = [], 4 * SMALL
            found.append(last[real])
        last[real].append(at)
        available[real] -= size
    return sorted(found, key=min, reverse=True)
