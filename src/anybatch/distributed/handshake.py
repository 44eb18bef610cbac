"""Handshake of a step: facts that ranks exchange, and numbers that must agree on all of them.

The size of the full batch is known when all ranks have exchanged theirs, so every step begins with
one exchange.

    rank 0:  8 samples ──┐
    rank 1:  7 samples ──┴──> 15 in all, of which its own are 8 to 14; micro-batches of 4 on both
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from anybatch.core.hooks import LeafHooks
from anybatch.core.modules import Modules
from anybatch.errors import BatchError, RankError

ANY = -1
"""Samples of all ranks that a micro-batch is good for, where that does not depend on them."""

Rows = list[list[float]]
"""The values of each rank, in numbers: of `Here`, then of `Alike`."""


class Here(NamedTuple):
    """Facts that this rank brings to a step.

    Attributes:
        size: samples.
        micro_batch: samples in a micro-batch.
        covers: the samples of all ranks for which it holds; `ANY` if it does not depend on them, 0
            if they must be counted first.
        lanes: 1 where samples meet in BatchNorm.
        trains: 1 with backward.
        coupled: 1 if the loss needs all outputs at once.
    """

    size: int
    micro_batch: int
    covers: int
    lanes: int
    trains: int
    coupled: int


class Beginning:
    """Mini-batch over all ranks, from the facts of each.

    Attributes:
        sizes: samples of each rank.
        size: N_B over all ranks.
        begin: the place of this rank's first sample among them.
        first: the first rank that has samples.
        micro_batch: the smallest of any rank that has samples.
        lanes: samples meet in BatchNorm on some rank.
        coupled: some rank knows that the loss needs all outputs.
        settled: no rank has to plan for more samples than it has.

    Raises:
        BatchError: no rank has a sample.
        RankError: some call `backward`, others `evaluate`; or they are not alike.
    """

    def __init__(self, rows: Rows, rank: int) -> None:
        numbers = len(Here._fields)
        every = [Here(*map(int, row[:numbers])) for row in rows]
        self.sizes = [one.size for one in every]
        self.size = sum(self.sizes)
        self.begin = sum(self.sizes[:rank])
        if self.size == 0:
            raise BatchError("a batch must hold at least one sample, and no rank has any")
        if len({one.trains for one in every}) > 1:
            said = ", ".join(f"rank {r}: {_CALL[bool(o.trains)]}" for r, o in enumerate(every))
            raise RankError(f"all ranks must make the same step, and they do not ({said})")
        refuse_unlike([Alike(*row[numbers:]) for row in rows])
        self.first = next(r for r, size in enumerate(self.sizes) if size)
        self.micro_batch = min(one.micro_batch for one in every if one.size)
        self.lanes = any(one.lanes for one in every)
        self.coupled = any(one.coupled for one in every)
        self.settled = all(one.covers == ANY or one.covers >= self.size for one in every)


_CALL = {True: "backward", False: "evaluate"}


# Numbers that must agree on all ranks, or the sum of their gradients is no gradient.
#
# Ranks add up numbers by their position. Two models that were drawn from different seeds,
# registered in another order or frozen differently, or engines that are called in another order,
# give sums that look like any other. DistributedDataParallel hides the first of these by sending
# the weights of rank 0, once. Here every step begins with a few numbers that all ranks compare.
#
#     every step   parameters: names, shapes, dtypes, frozen or not; how many hooks they have; which
#                  engine it is; the scale; whether BatchNorm is adaptive
#     first step   the values of all parameters

Named = list[tuple[str, Tensor]]


class Alike(NamedTuple):
    """Numbers that must be the same on all ranks.

    Attributes:
        form: of names, shapes, dtypes and ``requires_grad`` of the parameters.
        order: which engine it is, counted by their first steps; 0 before its own has ended.
        values: of the parameters, before the first step has ended; then 0.
        scale: factor of the gradients.
        adaptive: whether BatchNorm is.
        hooks: of how many hooks the parameters have.
    """

    form: float
    order: float
    values: float
    scale: float
    adaptive: float
    hooks: float


WORDS = {
    "adaptive": 'be given batchnorm="adaptive", or none of them, and {}: make Engine alike on '
    "every rank",
    "form": "train parameters of the same names, shapes and dtypes, in the same order, the same of "
    "them frozen, and {}: build model, loss and optimizer alike on every rank",
    "order": (
        "step the same engines in the same order, and {}: create and call them in the same order"
    ),
    "values": "begin with the same parameters, and {}: seed every rank alike before the model is "
    "built, load the same checkpoint, or use DistributedDataParallel, which sends those of rank 0",
    "hooks": "have hooks on the same parameters, which get the gradient of all ranks on each, and "
    "{}: register them alike on every rank",
    "scale": "scale gradients alike, and {}: give every rank a GradScaler in the same state",
}


def refuse_unlike(ranks: list[Alike]) -> None:
    """Refuse a step of ranks that differ."""
    for what, words in WORDS.items():
        every = [getattr(one, what) for one in ranks]
        others = ", ".join(f"rank {rank}" for rank, one in enumerate(every) if one != every[0])
        if others:
            found = f"{others} does not as rank 0 does"
            raise RankError(f"all ranks must {words.format(found)}")


def named_parameters(modules: Modules, optimizer: torch.optim.Optimizer | None) -> Named:
    """Return the parameters that all ranks know before a step, in their order, once each."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (f"{path}.{name}", parameter))
    groups = [] if optimizer is None else optimizer.param_groups
    for parameter in (p for group in groups for p in group["params"]):
        found.setdefault(id(parameter), ("of the optimizer", parameter))
    return list(found.values())


class Form:
    """Checksum of the names, shapes, dtypes and ``requires_grad`` of parameters, cached."""

    def __init__(self) -> None:
        self._cached: Any = None
        self._number = 0

    def number(self, named: Named) -> int:
        """Return a number of 32 bits."""
        described = [(name, _shape(p), p.dtype, p.requires_grad) for name, p in named]
        if described != self._cached:
            self._cached, self._number = described, zlib.crc32(repr(described).encode())
        return self._number


def hooks_of(named: Named, hooks: LeafHooks) -> int:
    """Return a number of 32 bits made of how many hooks parameters have; 0 where none has any."""
    counts = [(at, *hooks.count(p)) for at, (_, p) in enumerate(named) if p in hooks]
    return zlib.crc32(repr(counts).encode()) if counts else 0


def values_of(named: Named) -> int:
    """Return a number of 32 bits made of all bytes of plain dense parameters."""
    found = 0
    for _, parameter in named:
        plain = type(parameter) in (Tensor, torch.nn.Parameter)
        if plain and parameter.layout == torch.strided and not parameter.is_meta:
            flat = parameter.detach().cpu().resolve_conj().contiguous().reshape(-1)
            found = zlib.crc32(flat.view(torch.uint8).numpy().data, found)
    return found


def has_lazy(named: Named) -> bool:
    """Say whether some parameter has no values yet."""
    return any(is_lazy(parameter) for _, parameter in named)


def _shape(parameter: Tensor) -> tuple[int, ...] | None:
    return None if is_lazy(parameter) else tuple(parameter.shape)
