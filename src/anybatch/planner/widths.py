"""Memory of a lane paged between kernels: the inputs and results of its widest kernel.

If all of a lane may be evicted between two kernels (`anybatch.memory.pager`), a step holds the
bytes that exist once for all lanes, and the inputs and outputs of the next kernel. A dry run
without data yields these, and the bytes of a lane without eviction.

    kernel t     needs a, b (made by this lane) ──> makes c         widest: max needs, max makes

A loss of all outputs is computed by one lane, and its tensors may be evicted as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.core import tree
from anybatch.core.batch import count_micro_batches
from anybatch.core.rounding import rounded, rounding
from anybatch.execution.case import Case, first_rows
from anybatch.execution.signature import bytes_of
from anybatch.memory.meter import Meter, tensors_in
from anybatch.memory.timeline import Bytes, Timeline
from anybatch.planner import rehearse
from anybatch.planner.forecast import Forecast, merged, total


@dataclass(frozen=True)
class Widths:
    """Memory of a step in lanes that are paged between kernels, in bytes.

    Attributes:
        there: owner -> bytes that exist once for all lanes, the inputs of one included.
        other_peak: owner -> bytes at the peak before and after the step.
        needs: the most bytes of its lane that a kernel needs.
        makes: the most that a kernel makes.
        events: kernels of a lane, forward and backward.
        held: its bytes after each of them.
        joined: the most that a loss of all outputs has at once, which one of the lanes computes.
    """

    there: dict[str, int]
    other_peak: dict[str, int]
    needs: int
    makes: int
    events: tuple[str, ...]
    held: tuple[int, ...]
    joined: int

    @property
    def holds(self) -> int:
        """Return the most that a lane has at once."""
        return max(self.held)

    def every(self, lanes: int) -> int:
        """Return the most that so many lanes have at once."""
        return lanes * self.holds + self.joined

    @property
    def floor(self) -> int:
        """Return the fewest bytes with which such a step can be made."""
        return max(total(self.there) + self.needs + self.makes, total(self.other_peak))

    def limit(self, budget: int) -> int:
        """Return the bytes that all lanes may hold before a kernel runs, within a budget."""
        return budget - total(self.there) - self.makes


def widths(foreseen: Forecast, fakes: Case, n: int, size: int) -> Widths:
    """Rehearse a lane.

    Args:
        foreseen: forecast of such steps.
        fakes: the case without data.
        n: samples in a micro-batch; all of them only where other ranks have more.
        size: N_B, samples in the mini-batch.
    """
    watched: list[WidthRecorder] = []

    def sends(meter: Meter) -> WidthRecorder:
        watched.append(WidthRecorder(meter))
        return watched[0]

    case = replace(first_rows(fakes, size), global_samples=foreseen.global_samples)
    line = rehearse.divided(
        case,
        n,
        foreseen.inspection,
        accumulator=False,
        sends=sends,
        around=lambda: watched[0].joins,
    )
    (recorder,) = watched
    last = len(recorder.spans) - 1
    full = max(range(last + 1), key=lambda i: (recorder.sizes[i], i))  # the last may be smaller
    (begin, end), before = recorder.spans[full], _before(line, full, recorder)
    most = np.maximum(before, _before(line, last, recorder))  # of inputs, and of gradients
    there = dict(zip(line.owners, map(int, most), strict=True))
    own = line.live[begin:end] - before
    if full == 0 < last:  # it makes the gradients, which are there once
        own = own[:, [owner != "gradients" for owner in line.owners]]
    lane = own.sum(1)
    held = foreseen.held(size, divided=True)
    if len(recorder.spans) == 1:  # the only one of this rank makes the gradients
        held = merged(held, {"gradients": foreseen.gradients})
    outside = [t for t in range(len(line.events)) if not any(a <= t < b for a, b in recorder.spans)]
    between = max((int(line.live[t].sum()) for t in outside), default=0) - sum(map(int, most))
    # A loss of all outputs takes rows of all lanes, which are sent to other ranks, too.
    brought = _brought(foreseen, case, n, size) if foreseen.inspection.coupled else 0
    return Widths(
        there={owner: count for owner, count in merged(there, held).items() if count},
        other_peak=max(foreseen.other_peaks(n, size), key=total),
        needs=max(
            recorder.needs,
            recorder.joins.needs + brought,
            foreseen.pieces,  # of gradients, when lanes hold nothing
        ),
        makes=max(recorder.makes, recorder.joins.makes),
        events=line.events[begin:end],
        held=tuple(max(0, int(count)) for count in lane),
        joined=max(0, between) if foreseen.inspection.coupled else 0,
    )


def _brought(foreseen: Forecast, case: Case, n: int, size: int) -> int:
    """Return the bytes of the outputs and targets of all samples, in micro-batches of `n`."""
    there = [t for _, t in tree.tensors(case.rows.targets) if t.dim()]
    row = foreseen.inspection.shows + sum(-(-bytes_of(t) // max(len(t), 1)) for t in there)
    tensors = count_micro_batches(size, n) * (len(foreseen.inspection.layout) + len(there))
    return size * row + tensors * (rounding(case.device) - 1)


def _before(line: Timeline, i: int, recorder: WidthRecorder) -> Bytes:
    """Return the live bytes as the i-th micro-batch begins; for the last one, gradients too."""
    begin, _ = recorder.spans[i]
    there: Bytes = line.live[begin - 1] if begin else 0 * line.live[0]
    return there


class WidthRecorder:
    """Recorder of the bytes that kernels of micro-batches need and make; nothing is evicted.

    Args:
        meter: counts the bytes of the rehearsal.

    Attributes:
        needs: the most bytes of its micro-batch that a kernel has needed.
        makes: the most bytes that a kernel has made.
        spans: where each micro-batch begins and ends, in kernels.
        sizes: samples of each.
        joins: records the kernels of a loss of all outputs.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter, self.joins = meter, KernelBytes(meter)
        self.needs = self.makes = 0
        self.spans: list[tuple[int, int]] = []
        self.sizes: list[int] = []

    def run(self, work: Callable[[], None], size: int, *, first: bool) -> None:
        """Do `work`, forward and backward of a micro-batch of `size` samples."""
        del first
        begin = self._meter.events
        with KernelBytes(self._meter) as kernels:
            work()
        self.needs, self.makes = max(self.needs, kernels.needs), max(self.makes, kernels.makes)
        self.spans.append((begin, self._meter.events))
        self.sizes.append(size)


class KernelBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records the bytes that each kernel needs and makes.

    Args:
        meter: counts bytes, around this.

    Attributes:
        needs: the most bytes made under this mode that one has needed.
        makes: the most bytes that one has made.
    """

    supports_higher_order_operators = True

    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.needs = self.makes = 0
        self._meter = meter
        self._made: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one kernel."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            operands = _storages((args, kwargs))
            self.needs = max(self.needs, sum(self._made.get(key, 0) for key in operands))
            before = self._meter.live
            result = func(*args, **kwargs)
            made = {key: size for key, size in _storages(result).items() if key not in operands}
        self._made |= made
        self.makes = max(self.makes, self._meter.live - before)
        return result


def _storages(values: Any) -> dict[int, int]:
    """Return address and bytes of the storages of all strided tensors in `values`."""
    found: dict[int, int] = {}
    for tensor in tensors_in(values):
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            found[storage._cdata] = rounded(storage.nbytes(), tensor.device)
    return found
