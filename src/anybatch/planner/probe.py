"""Bytes of a real micro-batch or step, and of an optimizer's update, as their device counts them.

What kernels allocate besides tensors is in no dry run. So a micro-batch is run on the device, twice
because the second one finds sums of gradients, and all state is restored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anybatch.core import accelerator, accelerators, pytree
from anybatch.core.absent import type_of
from anybatch.core.batch import MicroBatch
from anybatch.core.modules import Modules, eager, local, tensors_of
from anybatch.core.oom import out_of_memory
from anybatch.core.optimizers import SMALL, inner_step, resident_state_bytes, rounded, state_bound
from anybatch.core.transaction import Before
from anybatch.distributed.fsdp import Sharded
from anybatch.execution.few_rows import quietly
from anybatch.execution.gradients import Gradients
from anybatch.execution.prefetch import link_to
from anybatch.execution.signature import Case, few
from anybatch.execution.step import Step
from anybatch.execution.streaming import Parts, discoverer
from anybatch.memory.fakes import Fakes, interrupted_between_functions, large, paged, uncounted
from anybatch.memory.ledger import Timeline
from anybatch.memory.meter import FOREIGN, Meter
from anybatch.offloading.state_mover import parts_of, widest
from anybatch.planner.rehearsal import Inspection, make_step, put_back, unharmed


def ran(case: Case, inspection: Inspection, n: int) -> bool:
    """Run forward and backward of one micro-batch of the real case twice, and restore all state.

    The second run finds sums of gradients, where it would. Return whether memory was enough.
    """
    try:
        single, once_only = n >= case.size, 2 * n > case.size
        case = unharmed(few(case, n), n, writes=inspection.copies)
        with put_back(case) as before, torch.set_grad_enabled(case.trains):
            gradients = Gradients(case.leaves, wide=not single) if case.trains else None
            step = make_step(case, link_to(case.device), n, gradients, 1)
            step.traits.layout, step.traits.copies = inspection.layout, inspection.copies
            step.discover = discoverer(step, before)
            step.coupled = inspection.coupled and not single
            (micro,) = step.feed()
            for _ in range(2):
                if once_only and step.gradients is not None:
                    step.gradients.restart()  # it comes first, and finds no sums
                _run(step, micro)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return False
    return True


def workspace(case: Case, inspection: Inspection, n: int, held: int) -> int | None:
    """Return the bytes that CUDA's allocator adds to a micro-batch's forecast tensors.

    These are `held` bytes at its peak, in addition to those allocated before. 0 on a device without
    a statistic, None if memory runs out.
    """
    there = accelerator.of(case.device)
    if not there.peaks:
        return 0
    accelerators.clear_workspaces()
    before = there.allocated(case.device)
    peak = read_peak(case.device, anew=True)
    if not ran(case, inspection, n):
        return None
    # Bytes that remain are exact; those at the peak are foreseen, and may be less
    # (test_the_peak_of_a_step_is_what_was_foreseen).
    stays = max(0, there.allocated(case.device) - before)
    return stays + max(0, (peak() or 0) - before - stays - held)


def _run(step: Step, micro: MicroBatch) -> None:
    """Run one micro-batch; its gradients remain."""

    def train(micro: MicroBatch) -> None:
        parts = Parts(step, micro.inputs)
        if step.coupled:
            # Such a loss is never called with a part of the batch: each part of the model is run,
            # and backward from it.
            for at in range(len(parts)):
                roots = [t for _, t in pytree.tensors(parts.forward(micro, at)) if t.requires_grad]
                step.pull(roots, [torch.ones_like(root) for root in roots])
                del roots
            return
        with step.in_chunks():
            loss = step.loss.full_batch(step.forward(micro), micro)
        step.pull([loss], step.scaled([torch.ones_like(loss)]))

    step.under(train)(micro)
    finish(step.device)


def finish(device: torch.device) -> None:
    """Wait for a device that computes on its own."""
    accelerator.of(device).synchronise(device)


# The bytes that a real step holds at its peak, as the device or the meter counts them.


Peak = Callable[[], int | None]
"""Returns the most bytes that were held; None if unknown."""


def read_peak(device: torch.device, *, anew: bool = False) -> Peak:
    """Return a function that reads the most bytes that a device's allocator hands out from now on.

    Its statistic is the user's, too, and cannot be restored after a reset. It shows this peak if it
    grows from now on, or if it was no more than the allocated bytes now.

    Args:
        device: without such a statistic, the peak is unknown.
        anew: reset the statistic if it would not show the peak. Default False.

    Returns:
        A function that returns the bytes; None if unknown.
    """
    counts = accelerator.of(device)
    if not counts.peaks:
        return lambda: None
    before = counts.peak(device)
    recorded = before == counts.allocated(device)
    if anew and not recorded:
        counts.reset_peak(device)
        recorded = True

    def peak() -> int | None:
        found = counts.peak(device)
        return found if recorded or found > before else None

    return peak


@contextmanager
def live_peak(
    device: torch.device, existing: Mapping[str, Iterable[Tensor]]
) -> Iterator[Callable[[], int]]:
    """Count the most bytes of tensors that are live on a device in the body.

    Its allocator counts where it reports a peak; elsewhere every kernel is intercepted, and owner
    -> tensors that are live before count. Yields a function that returns the bytes so far; it may
    be called after the body.
    """
    if accelerator.of(device).peaks:
        peak = read_peak(device, anew=True)
        yield lambda: peak() or 0
        return
    with Meter(device, existing) as meter:
        yield lambda: int(meter.peak)


class CountedBytes(NamedTuple):
    """Bytes that are counted.

    Attributes:
        peak: returns the most bytes.
        live: returns those that are live now; 0 where a device counts them.
    """

    peak: Callable[[], int]
    live: Callable[[], int]


@contextmanager
def measured(
    device: torch.device,
    modules: Modules,
    optimizer: torch.optim.Optimizer | None,
    before: Before,
    shards: list[Tensor],
    limit: int | None = None,
    stops: Callable[[], bool] = lambda: True,
) -> Iterator[CountedBytes]:
    """Count the peak bytes of the body, with the tensors that were live before it.

    Args:
        device: its allocator's peak, if it records one; else the body runs under the meter.
        modules: their tensors are there.
        optimizer: and its state.
        before: and the gradients that were there.
        shards: with remains of gathered parameters.
        limit: the most bytes, under the meter. Default None: any.
        stops: whether the body may end where it holds more; then torch.OutOfMemoryError is raised.

    Yields:
        Functions that return the bytes.
    """
    if accelerator.of(device).peaks:
        with live_peak(device, {}) as peak:
            yield CountedBytes(peak, lambda: 0)
        return
    every = [module for _, module in modules]
    pages = paged()
    there = [*tensors_of(every, "_parameters"), *shards]
    gradients = [gradient for _, gradient in before.gradients if gradient is not None]
    owned = {
        FOREIGN: [t for t in (*there, *gradients) if pages.holds(t)],
        "parameters": there,
        "buffers": [
            *tensors_of(every, "_buffers"),
            *(b.values for b in before.buffers if b.values is not None),
        ],
        "optimizer": [] if optimizer is None else state_tensors(optimizer),
        "gradients": gradients,
    }
    leaves = [leaf for leaf, _ in before.gradients]
    with (
        eager(),
        Meter(device, owned, limit=limit, stops=stops) as meter,
        uncounted(meter, leaves, pages.ids(leaves)),
    ):
        yield CountedBytes(lambda: int(meter.peak) + pages.most, lambda: meter.live)


# The bytes that the C library has handed out: a meter costs up to three times the time of small
# kernels, and this little, more in a heap in many pieces. It counts all of
# the process, so it shows that something has changed, and a meter how much.

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Info(ctypes.Structure):
    """Statistic of glibc's allocator, in bytes and blocks."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


@cache
def _mallinfo() -> Callable[[], _Info] | None:
    """Return the function that tells it; None where the C library has none."""
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    found.restype = _Info
    return found


def in_use() -> int:
    """Return the bytes that are allocated now; 0 where the C library does not tell.

    Source: glibc, mallinfo2(3): blocks of the heap in use, and blocks that were mapped.
    """
    tell = _mallinfo()
    if tell is None:
        return 0
    info = tell()
    return int(info.uordblks + info.hblkhd)


class LiveBytes:
    """Record of the most bytes that are live, by `now()`, beyond those at its start."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now, self._start, self.most = now, now(), 0

    def __call__(self) -> None:
        """Compare the bytes of this moment."""
        self.most = max(self.most, self._now() - self._start)


# Optimizer state and update of a forecast, by a dry run on fakes before the first step.
#
# The state is made by the first ``optimizer.step()``; until then only a dry run shows its bytes.

IN_PARTS = "optimizer, in parts"
"""The owner of state that passes through memory."""


def update(
    optimizer: torch.optim.Optimizer, modules: list[nn.Module], sharded: Sharded | None = None
) -> Timeline | None:
    """Rehearse the first ``optimizer.step()``, on fakes, with every gradient there.

    Return its bytes, in parts if its state is offloaded; None if the optimizer is not torch's own,
    or reads a value. Tensors of `modules` are there too; `sharded` has gathered them only for the
    step.
    """
    fakes = Fakes()
    twin = fakes.optimizer(optimizer)
    if twin is None:
        return None
    stepped = [p for group in twin.param_groups for p in group["params"]]
    device = next((p.device for p in stepped), torch.device("cpu"))
    try:
        there = {id(p) for p in stepped}
        resident = _parameters(modules, sharded)
        trained = [fakes.of(p) for p in resident if p.requires_grad]
        others = [p for p in trained if id(p) not in there]  # another optimizer's, perhaps
        pages = paged()
        real = [*(p for group in optimizer.param_groups for p in group["params"]), *resident]
        paged_ids = frozenset(id(fakes.of(p)) for p in real if pages.holds(p))
        made = _with_gradients(fakes, stepped, others)
        foreach = accelerator.of(type_of(device)).facts.foreach
        for group in twin.param_groups:  # over lists of tensors, as torch does on some devices
            if foreach and group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True
        parameters = [*stepped, *map(fakes.of, resident)]
        gradients = [gradient for p, gradient in made if id(p) in paged_ids and large(gradient)]
        owned = {
            FOREIGN: [*(p for p in parameters if id(p) in paged_ids), *gradients],
            "parameters": parameters,
            "buffers": map(fakes.of, tensors_of(modules, "_buffers")),
            "gradients": [gradient for _, gradient in made],
        }
        available = resident_state_bytes(optimizer)
        with (
            interrupted_between_functions(),
            quietly(),
            torch.no_grad(),
            fakes.mode,
            Meter(device, owned) as meter,
        ):
            if available is None:
                type(twin).step(twin)
            else:
                _step_in_parts(twin, available, meter, both=bool(paged_ids))
    except Exception:  # whatever an optimizer does that fakes cannot
        return None
    meter.claim("optimizer", state_tensors(twin))
    found: Timeline = meter.timeline()
    return found if available is None else _with_parts(found, 0 if paged_ids else available)


def _with_gradients(
    fakes: Fakes, stepped: list[Tensor], others: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return all parameters that have a gradient, with it; those that are stepped hold theirs."""
    with interrupted_between_functions(), fakes.mode:
        made = [(p, torch.empty_like(p)) for p in others]
        for parameter in stepped:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    return [*made, *((p, p.grad) for p in stepped if p.grad is not None)]


def _step_in_parts(
    twin: torch.optim.Optimizer, available: int, meter: Meter, *, both: bool
) -> None:
    """Step a few parameters at a time; only small entries of their state remain.

    With `both`, parameters and gradients are paged within half of the available bytes.
    """
    every, inner = twin.param_groups, inner_step(twin)
    size_of = partial(state_bound, twin)
    if both:
        size_of, available = partial(widest, size_of), available // 2
    for part in parts_of(twin, size_of, available):
        twin.param_groups = part.groups(every)
        inner(twin)
        for _, parameter in part.members:
            state = twin.state.get(parameter, {})
            large = [k for k, v in state.items() if isinstance(v, Tensor) and v.nbytes >= SMALL]
            meter.claim(IN_PARTS, [state.pop(name) for name in large])
    twin.param_groups = every


def _with_parts(found: Timeline, available: int) -> Timeline:
    """Return a timeline in which parts fill their budget, since they overlap as they are paged.

    The bytes of all the state are the most that can be in it. Bytes shared with parameters are
    counted with those.
    """
    live = found.live.copy()
    if IN_PARTS in found.owners:
        live[:, found.owners.index(IN_PARTS)] = 0
    sizes, grain = [size for o, size, *_ in found.spans if o == IN_PARTS], found.grain
    made = sum(-(-size // grain) * grain for size in sizes)
    return replace(found, live=live).plus({IN_PARTS: min(available, made)})


def _parameters(modules: list[nn.Module], sharded: Sharded | None) -> list[Tensor]:
    """Return the parameters that are there at an update."""
    every = tensors_of(modules, "_parameters")
    if sharded is None:
        return every
    return [*(p for p in every if not sharded.holds(p)), *sharded.shards]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every tensor of an optimizer's state that is resident."""
    states = optimizer.state.values()
    every = [local(tensor) for state in states for _, tensor in pytree.tensors(dict(state))]
    return [tensor for tensor in every if not tensor.is_meta]


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of that state."""
    held = [] if optimizer is None else state_tensors(optimizer)
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in held}
    return sum(rounded(one.nbytes(), one.device) for one in storages.values())
