"""Memory models: where the tensors of a step are, which sizes fit so, and the plan of one.

    resident     all of them on the device                      `anybatch.planner.resident_memory`
    offloaded    saved tensors in a store                       `anybatch.planner.offload_memory`
    paged        all of a lane, but what its kernel needs       `anybatch.planner.paged_lockstep`

Each answers the same questions for one signature: whether a size fits, which is the largest that
does, and how a batch is run in it. If none does, it raises `BudgetError`, with the words from here.
`anybatch.planner.decision` chooses between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf, isinf
from typing import Any, ClassVar

import torch

from anybatch.core import accelerator
from anybatch.core.absent import enough
from anybatch.core.plan_sections import Candidate, Memory
from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError, NotExactError, NotYetError
from anybatch.execution.signature import Case, RunPlan, Signature, as_fakes
from anybatch.execution.tiles import Tiles
from anybatch.loss.chunked import WIDE
from anybatch.loss.chunked_rows import fast_chunks
from anybatch.memory.spill import Spill
from anybatch.planner import rehearsal
from anybatch.planner.forecast import WORKSPACE, Forecast
from anybatch.planner.search import MicroBatchSearch, Place

CHUNKS = (4 << 20, 1 << 20)
"""Bytes of the chunks of a wide linear map that are tried where its fast ones do not fit."""

TILES = 32, 128, 512, 2048
"""Tokens of the tiles that are tried where no sample fits otherwise: each is a forecast."""


@dataclass(frozen=True)
class PlanningRequest:
    """Planning request for one mini-batch: its budget, and queries, each made where it is needed.

    Attributes:
        signature: of the batch.
        case: returns the case of a dry run.
        optimizer: its state counts, as it will be.
        refuse_division: raises where the batch must not be divided.
        budget: bytes.
        source: where these come from, in words.
        spill: store of offloaded tensors.
        timed: steps in different sizes may show the fastest.
        thorough: they are to tell the seconds of many sizes, of an undivided batch that fits, too.
        follows: a step of it follows, so what it does not need is not foreseen.
        chunked: bytes of the chunks of its wide linear maps and losses; 0 is none.
        tile: tokens of the tiles of modules that act on each token by itself; 0 is none.
        compares: chunks may be tried, too, where larger micro-batches may be clearly faster.
        offloads: in chunks or tiles, saved tensors may be offloaded, too.
    """

    signature: Signature
    case: Callable[[], Case]
    optimizer: torch.optim.Optimizer | None
    refuse_division: Callable[[], object]
    budget: int
    source: str
    spill: Spill
    timed: bool
    thorough: bool
    follows: bool
    chunked: int = 0
    tile: int = 0
    compares: bool = False
    offloads: bool = False

    def in_chunks(self, nbytes: int) -> PlanningRequest:
        """Return the request with wide linear maps and losses in chunks of so many bytes."""
        case = cache(lambda: replace(self.case(), chunked=nbytes))
        return replace(self, case=case, chunked=nbytes, compares=False)

    def in_tiles(self, tokens: int) -> PlanningRequest:
        """Return the request with modules that act on each token by itself in tiles of so many."""
        tiles = Tiles(tokens) if tokens else None
        return replace(self, case=cache(lambda: replace(self.case(), tiles=tiles)), tile=tokens)

    def smaller_chunks(self, foreseen: Forecast | None) -> list[int]:
        """Return the bytes of smaller chunks than these; 0, which is last, is none.

        `foreseen` is the forecast of the batch; None where there is none.
        """
        if foreseen and not self.chunked and not self.has_wide_maps(foreseen):
            return []
        fast = self.fast_chunks
        every = sorted({*fast, *(n for n in CHUNKS if n < fast[0])}, reverse=True)
        smaller = [n for n in every if n < (self.chunked or inf)]
        return [*smaller, 0] if self.chunked else smaller  # without, tensors may be offloaded

    def has_wide_maps(self, foreseen: Forecast) -> bool:
        """Say whether a step computes anything in chunks; true where fakes cannot show it.

        A narrow weight is one of a wide map where it is transposed, as `may_be_chunked` counts it.
        """
        if not foreseen.on_fakes:
            return True
        case = as_fakes(self.in_chunks(1).case())
        try:
            return rehearsal.watch_loss(case, foreseen.inspection).wide
        except Exception:  # it reads values, or the model's own
            return True

    @property
    def on_host(self) -> bool:
        """Whether the model is on a host."""
        return accelerator.of(self.case().device).host

    @property
    def longest(self) -> int:
        """Tokens of the longest call of a module in tiles, in forecasts so far; 0 where none is."""
        tiles = self.case().tiles
        return tiles.longest if isinstance(tiles, Tiles) else 0

    @property
    def may_be_tiled(self) -> bool:
        """Whether modules can be computed in tiles: not in lockstep, over ranks, or in batch draws.

        No forecast is made of these yet.
        """
        barred = self.signature.lanes or self.signature.global_samples or self.case().draws
        return not barred

    @cached_property
    def full_batch(self) -> bool:
        """Whether micro-batches that know nothing of each other would be another training."""
        return self.signature.lanes or self.undivided

    @property
    def may_be_chunked(self) -> bool:
        """Whether wide linear maps and losses can be computed in chunks of rows.

        Not in lockstep, over ranks, or with draws of the full batch, which a mode would not hear.
        Where no weight is wide, nothing would be.
        """
        case = self.case()
        if self.signature.lanes or self.signature.global_samples or case.draws:
            return False
        if case.outputs:  # the logits are among them, and the engine stores all of them
            return False
        if case.loss.declares:  # an inspection calls it with outputs, which hold one column then
            return False
        weights = (one for one in case.leaves if one.dim() == 2)
        return any(max(one.shape) > WIDE * min(one.shape) for one in weights)

    @property
    def fast_chunks(self) -> tuple[int, int]:
        """Bytes of the fast chunks of the widest linear map: one to prefer, and the least one."""
        wide = [one for one in self.case().leaves if one.dim() == 2]
        every = (fast_chunks(max(one.shape), min(one.shape), one) for one in wide)
        return max(every, default=(0, 0))

    @property
    def spread(self) -> bool:
        """Whether the parameters are, over ranks."""
        return self.signature.global_samples > 0 and self.case().sharded is not None

    def refuse_spread(self) -> None:
        """Refuse to offload saved tensors where parameters are sharded over ranks.

        Raises:
            NotYetError: they are.
        """
        if self.spread:
            raise NotYetError(
                "saved tensors cannot be offloaded today where parameters are sharded over ranks: "
                'plan with offload="off", or without sharding'
            )

    @cached_property
    def undivided(self) -> bool:
        """Whether the batch must not be divided."""
        try:
            self.refuse_division()
        except NotExactError:
            return True
        return False


class MemoryModel(ABC):
    """Choice of a micro-batch size with the tensors of a step in one `place`, for one signature.

    Dry runs of the search are used and added to, where it is one of this signature.
    """

    place: ClassVar[Place]

    def __init__(
        self, foreseen: Forecast, request: PlanningRequest, search: MicroBatchSearch
    ) -> None:
        self.foreseen, self._request, self._budget = foreseen, request, request.budget
        self._size, self._most = request.signature.size, request.signature.largest
        searched = search.is_of(request.signature)
        runs = search.dry_runs if searched else {}
        self._steps: dict[int, Any] = runs.setdefault(self.place, {})
        self._seconds = search.of(self.place) if searched else {}

    @property
    @abstractmethod
    def largest(self) -> int:
        """The most samples in a micro-batch that fit; 0 where none do."""

    @abstractmethod
    def fits(self, n: int) -> bool:
        """Say whether micro-batches of `n` samples fit."""

    @abstractmethod
    def planned(self, n: int, *, checked: bool = False) -> RunPlan:
        """Return how a batch is run in micro-batches of `n`, `checked` to fit once more or not.

        Raises:
            BudgetError: they do not fit.
            StoreError: the tensors that leave do not fit in the store.
        """

    @abstractmethod
    def rows(self) -> Iterable[Candidate]:
        """Return the sizes worth a line in a plan."""

    def _memory(
        self, owners: Mapping[str, int], predicted: int, *, how: str = "", **more: Any
    ) -> Memory:
        """Return the memory of a plan: owner -> bytes at its peak, bytes of that, other fields."""
        return Memory(
            budget=self._budget,
            source=self._request.source,
            predicted=predicted,
            owners=ranked(owners),
            undivided=self.foreseen.peak(self._size, self._size),
            how=f"{self.foreseen.how}{how}",
            **more,
        )

    def _too_small(
        self, needed: int, step: str, owners: Mapping[str, int], *, size: str = "", model: str = ""
    ) -> BudgetError:
        """Return the error with the bytes needed, the budget, and a budget that would fit.

        `step`, `size` and `model` are words: how it would be run, what to give instead of more
        bytes, and in addition to those. `owners` are empty where they are unknown.
        """
        listed = ", ".join(f"{name} {show_bytes(count)}" for name, count in ranked(owners))
        workspace = "a smaller workspace, " if WORKSPACE in owners else ""
        return BudgetError(
            f"a step must fit in memory, and {step} it needs {show_bytes(needed)}"
            f"{listed and f' ({listed})'}, and the budget is {show_bytes(self._budget)} "
            f"({self._request.source}): give {size}{enough(needed)} or more, {workspace}{model}"
            "smaller samples, or an optimizer with less state",
            needed=needed,
            budget=self._budget,
        )


def ranked(owners: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return owners and their bytes, the largest first."""
    return tuple(sorted(owners.items(), key=lambda pair: -pair[1]))


def finite(seconds: float | None) -> float | None:
    """Return the seconds of a step; None where it was not run, or ran out of memory."""
    return None if seconds is None or isinf(seconds) else seconds
