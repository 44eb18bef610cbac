"""Budget of a step: the default, the forecasts by signature, and errors of dry runs in it.

A budget includes the existing tensors of the step, and all that the step allocates. A budget that
is too small is refused by the memory models: `ResidentSizes.require`, or the one for offloading.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from anybatch.core import accelerator, accelerators
from anybatch.core.absent import ASSUMED, absent
from anybatch.core.modules import tensors_of
from anybatch.core.optimizers import rounded, state_bytes
from anybatch.core.pytree import tensors
from anybatch.core.units import show_bytes
from anybatch.errors import AnybatchError, BudgetError
from anybatch.execution.signature import MICRO_BATCHES, Case, Signature, bytes_of, stretched
from anybatch.memory.fakes import paged
from anybatch.memory.limits import available_memory
from anybatch.memory.meter import storages
from anybatch.planner.forecast import LOSS, Forecast
from anybatch.planner.full_batch import FULL_BATCH, Suffices
from anybatch.planner.ladder import FARTHER, SMALL, forecast
from anybatch.planner.memory_model import PlanningRequest
from anybatch.planner.probe import workspace

CUBLAS = "cuBLAS"
"""The owner of its workspaces, as they are assumed of a device that is not there."""


def other_tensors(case: Case, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of tensors on a device that are no states of a step."""
    # Workspaces of other threads and streams would count twice: a step makes its own
    # (test_the_peak_of_a_step_is_what_was_foreseen).
    accelerators.clear_workspaces()
    states = _bytes_of_states(case) + state_bytes(optimizer)
    other = accelerator.of(case.device).allocated(case.device) - states
    # `Engine.last` has the loss of the last step while the next one runs
    # (test_the_floor_is_enough).
    return max(0, other) + rounded(LOSS, case.device)


def ran_out(device: torch.device, budget: int, source: str) -> BudgetError:
    """Return the error of a dry run that ran out of a device's memory, within the budget or not."""
    there = accelerator.of(device)
    every = there.left(device) + there.allocated(device)
    return BudgetError(
        f"a few samples must fit on {device} before a step is planned, and in a dry run of them "
        f"memory ran out: it has {show_bytes(every)} for all tensors of this process, and the "
        f"budget is {show_bytes(budget)} ({source}). Free memory of the device, or give smaller "
        "samples or a smaller model, or micro_batch= instead of memory=, which needs no dry run",
        needed=every + 1,
        budget=budget,
    )


def on_cuda(found: Forecast, request: PlanningRequest, others: int) -> Forecast:
    """Return the forecast plus the workspace and the other tensors of CUDA's allocator.

    Workspace is measured at one sample, at few, and at the most that fit: kernels use other
    workspaces for few samples than for more. Only sizes that fit are run. If none does, or memory
    runs out, it is that of cuBLAS as assumed for a device that is not there.
    """
    case, budget, size = request.case(), request.budget, request.signature.size
    found = found.with_more("other tensors", others)
    measured = dict[int, int]()
    few = [] if found.indivisible else sorted({1, min(SMALL, size)}, reverse=True)
    while (n := few.pop() if few else found.largest(budget, size)) and n not in measured:
        if found.peak(n, size) > budget:
            continue
        took = workspace(case, found, n, size)
        if took is None:
            return found.with_more(CUBLAS, ASSUMED)
        measured[n] = took
        most = max(measured.values())
        found = replace(found, constant={**found.constant, "workspace": most}) if most else found
    return found if measured else found.with_more(CUBLAS, ASSUMED)


def default_budget(
    case: Case, optimizer: torch.optim.Optimizer | None, share: float | None
) -> tuple[int, str]:
    """Return the bytes of a share of the free ones plus the step's own, and their source."""
    device = absent()
    if device is not None:
        return device.budget(None, share)
    free, words = available_memory(case.device, share)
    return free + _bytes_of_states(case) + state_bytes(optimizer), words


def _bytes_of_states(case: Case) -> int:
    """Return the bytes of parameters, buffers and gradients that are here."""
    pages = paged()
    modules = [module for _, module in case.modules]
    states = [*tensors_of(modules, "_parameters"), *tensors_of(modules, "_buffers")]
    states = [*case.leaves, *(t for t in states if not is_lazy(t))]
    states += [leaf.grad for leaf in case.leaves if leaf.grad is not None]
    # Weights of a recurrent layer are views of one storage, which is rounded up once
    # (test_a_storage_that_weights_share_counts_once).
    found = {s._cdata: s for t in states if not pages.holds(t) for s in storages(t)}
    here = sum(rounded(s.nbytes(), s.device) for s in found.values()) + pages.here
    return here + (case.sharded.bytes if case.sharded is not None else 0)


# Store of forecasts by signature, in which a larger batch's forecast bounds smaller batches.
#
# Lengths and image sizes may change from batch to batch, and a dry run for each would cost seconds.
# A batch whose rows are all at least as large holds no less, so its forecast suffices; and the
# shapes of a new dry run are rounded up, so that it bounds the next ones too.
#
#     lengths 300, 410, 120, 500, 31 ...      rehearsed: 300, 512, 32
#
# A number in a batch may decide the held bytes (a number of selected tokens), or nothing at all (a
# count of steps). Two numbers that hold the same show that it is the latter.

LOOSE = 4
"""How many times as many elements a stored case may have to bound another one."""

MANY = 8
"""Numbers that are distinguished; of others the forecast with the most bytes stands in."""


class Foreseen:
    """Forecasts made so far, by signature of the mini-batch; `rehearsed` is how many.

    Real steps of the model held `missing` bytes more than fakes in other forecasts; None (default)
    where these were not compared. Without `fakes` it cannot be run on these.
    """

    def __init__(self, missing: int | None = None, *, fakes: bool = True) -> None:
        self.rehearsed, self._agreed, self._fakes = 0, missing is not None, fakes
        self._stored: list[tuple[Signature, Forecast]] = []
        self._same: set[Any] = set()
        self._more = missing or 0
        self._held: dict[Any, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, without forecasts, which hold fakes."""
        return vars(self) | {"_stored": []}

    def plain(self, signature: Signature) -> Signature:
        """Return the signature without its numbers, where these have no effect on memory."""
        same = self._same and _but_numbers(signature) in self._same
        return replace(signature, numbers=()) if same else signature

    def knows(self, signature: Signature) -> bool:
        """Return whether exactly this signature has a forecast."""
        plain = partial(replace, before=0, global_samples=0, most=0)
        return any(
            plain(saved) == plain(signature) and _same_ranks(saved, found, signature)
            for saved, found in self._stored
        )

    def hold_more(self, count: int, samples: int = 0) -> None:
        """Add `count` bytes to every forecast: a step has held more than was foreseen.

        Where there is none, because a plan was obeyed, to those that come. Where `samples` have
        held them because of their values, each of these as much.
        """
        if samples and self._stored:
            each = -(-count // samples)
            self._stored = [(saved, forecast.steeper(each)) for saved, forecast in self._stored]
        else:
            self._more += 0 if self._stored else count
            self._stored = [(saved, f.with_more("activations", count)) for saved, f in self._stored]
        self._held |= {
            _of_rows(saved): forecast.peak(saved.size, saved.size)
            for saved, forecast in self._stored
            if forecast.full_batch  # which goes where the batch does not fit any more
        }

    def forget(self, *, full_batches: bool = False) -> None:
        """Drop all forecasts, or only those of full batches: the next ones are made anew."""
        remain = [pair for pair in self._stored if full_batches and not pair[1].full_batch]
        self._stored = remain

    def bound(self, signature: Signature) -> Forecast | None:
        """Return a forecast that bounds this signature and is not many times larger; or None."""
        above = self._that_bound(signature)
        if above:
            saved, found = min(above, key=lambda pair: pair[0].elements)
            return found if saved.elements <= LOOSE * signature.elements else None
        # Of many that differ in numbers the largest stands in.
        size = signature.size
        others = [forecast for _, forecast in self._that_bound(signature, numbers=False)]
        if len(others) < MANY:
            return None
        return max(others, key=lambda forecast: forecast.peak(size, size))

    def _that_bound(
        self, signature: Signature, *, numbers: bool = True
    ) -> list[tuple[Signature, Forecast]]:
        """Return forecasts that bound a signature; without `numbers`, those of any numbers."""
        return [
            (saved, forecast)
            for saved, forecast in self._stored
            if (saved if numbers else replace(saved, numbers=signature.numbers)).bounds(signature)
            and saved.size >= signature.size
            and (
                saved.global_samples >= signature.global_samples > 0
                or _same_ranks(saved, forecast, signature)
            )
        ]

    def foresee(
        self, request: PlanningRequest, *, rounded: bool, suffices: Suffices | None = None
    ) -> Forecast:
        """Make and store the forecast of a batch, or of one that bounds it: sizes `rounded` up."""
        signature, found = request.signature, None
        self.rehearsed += 1
        bound = self._rounded(signature) if rounded else signature
        if bound != signature:
            agreed = any(one.case is not None for _, one in self._stored)
            found = _at(request, bound, suffices, agreed=agreed)
        if found is None:
            bound, found = signature, self._forecast(request, suffices)
        elif not request.on_host:
            found = on_cuda(found, request, other_tensors(request.case(), request.optimizer))
        found = found.with_more("activations", self._more) if self._more else found
        less = self._held.get(_of_rows(bound), 0) - found.peak(bound.size, bound.size)
        found = found.steeper(-(-less // bound.size)) if less > 0 else found
        self._stored.append((bound, found))
        self._compare(bound, found)
        return found

    def _forecast(self, request: PlanningRequest, suffices: Suffices | None) -> Forecast:
        """Return the forecast, compared with a small real step where its device is there to run it.

        Not where fakes have agreed with such steps before.
        """
        case, optimizer, device = request.case(), request.optimizer, absent()
        foresee = partial(forecast, case, optimizer, available=request.budget, fakes=self._fakes)
        if device is None and request.on_host:
            return foresee(verify=True, suffices=suffices, agreed=self._agreed)
        if device is None:
            others = other_tensors(case, optimizer)
            there = partial(on_cuda, request=request, others=others)
            return foresee(verify=True, others=others, on_device=there)
        try:
            found = foresee(verify=False, fakes=True)
        except (AnybatchError, MemoryError):
            raise
        except Exception:  # a value is read: the next rung, on the host
            found = foresee(verify=True)
        found = found.with_more("other tensors", rounded(LOSS, case.device))
        return found.with_more(CUBLAS, device.workspace)  # both as they are assumed

    def _rounded(self, signature: Signature) -> Signature:
        """Return the signature with its changing sizes rounded up, so that it bounds others."""
        first = next(
            (saved for saved, _ in self._stored if saved.tensors == signature.tensors), None
        )
        if first is None:
            return signature
        shapes = tuple(
            tuple(a if a == b else _power(b) for a, b in zip(before, now, strict=True))
            for before, now in zip(first.shapes, signature.shapes, strict=True)
        )
        size = signature.size if signature.size <= first.size else _power(signature.size)
        most = max(saved.global_samples for saved, _ in self._stored)
        ranks = signature.global_samples
        ranks = _power(ranks) if ranks > most > 0 else ranks
        return replace(signature, shapes=shapes, size=size, global_samples=ranks)

    def _compare(self, signature: Signature, found: Forecast) -> None:
        """Remember where another number has held the same."""
        sizes = {1, signature.size}
        peaks = [found.peak(n, signature.size) for n in sizes]
        for saved, other in self._stored:
            alike = _but_numbers(saved) == _but_numbers(signature)
            alike &= (saved.shapes, saved.size) == (signature.shapes, signature.size)
            others = alike and saved.numbers != signature.numbers
            if others and peaks == [other.peak(n, signature.size) for n in sizes]:
                self._same.add(_but_numbers(signature))
        self._stored = [(self.plain(saved), forecast) for saved, forecast in self._stored]


def _at(
    request: PlanningRequest, signature: Signature, suffices: Suffices | None, *, agreed: bool
) -> Forecast | None:
    """Return the forecast of the case with other shapes; None where the model cannot take them.

    On CUDA nothing is run: an index beyond a table ends all work on the device.
    """
    case, host = request.case(), request.on_host
    rows = stretched(case.rows, signature.shapes, MICRO_BATCHES * max(FARTHER))
    larger = replace(case, size=signature.size, rows=rows, global_samples=signature.global_samples)
    try:
        foresee = partial(forecast, larger, request.optimizer, available=request.budget)
        found = foresee(verify=host, agreed=agreed, suffices=suffices if host else None)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # longer than its table of positions, or whatever else
        return None
    if found.case is not None or found.how == FULL_BATCH:
        return found
    if found.inspection.coupled:  # what all outputs need was not seen
        return None
    # The dry run counted a few targets of those over which a loss counts
    # (test_a_loss_that_counts_over_all_targets_has_room_for_them_at_other_lengths).
    row = sum(bytes_of(t[:1]) for _, t in tensors(larger.rows.targets) if t.dim())
    return found.with_more("activations", row * signature.size)


def _same_ranks(saved: Signature, forecast: Forecast, signature: Signature) -> bool:
    """Say whether samples of other ranks make no difference: as many are there, or hold nothing."""
    counts = saved.global_samples, signature.global_samples
    coupled = forecast.inspection.coupled or saved.lanes
    return counts[0] == counts[1] or (all(counts) and not coupled)


def _of_rows(signature: Signature) -> Any:
    return signature.tensors, signature.shapes, signature.size, signature.trains


def _but_numbers(signature: Signature) -> Any:
    return signature.tensors, signature.modes, signature.lanes, signature.trains


def _power(count: int) -> int:
    """Return the smallest power of two that is not smaller."""
    return 1 << (count - 1).bit_length() if count > 0 else 0
