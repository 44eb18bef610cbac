"""BatchNorm over all parts of a batch, for every ``F.batch_norm`` of an unmodified model.

torch normalises by the statistics of its own rows. While this mode is on, training-mode batch
normalisation gets the moments of all rows from a barrier, and in backward the two sums that its
gradient needs; it computes only with its own rows.

    forward    x_hat = (x - mean) / sqrt(var + eps)            mean, var of all parts
    backward   dx = w / sqrt(var + eps) * (dy - S1 / N - x_hat * S2 / N)
               S1 = sum dy,  S2 = sum dy * x_hat over all parts;  dw = S2 and db = S1 of this part

Running statistics move once for all parts, and not again when a checkpointed part is computed anew.

Source: AGBN, Algorithms 1-3.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

from anybatch.core.accelerator import of
from anybatch.core.barrier import (
    END,
    Route,
    Site,
    Unseen,
    forwards_here,
    here,
    meeting_in,
    reduce,
    samples_here,
    site_of,
    standalone_here,
)
from anybatch.core.moments import Moments, accumulated, merged, moments_of
from anybatch.core.norm import BatchStatisticsError, Norms, refuse
from anybatch.core.transaction import Before, uninterrupted
from anybatch.errors import NotExactError
from anybatch.execution.proof.verdict import other_rows
from anybatch.execution.strides import standard
from anybatch.memory.fakes import paged


class Tracked:
    """Running statistics of a step, which move once for any number of parts.

    Args:
        counters: the ``num_batches_tracked`` of all modules.
        names: id of a running mean or a weight -> the path of its module. Default none.

    Attributes:
        counted: id of a counter -> forwards that it has counted.
        moved: ids of running means and variances that have moved.
    """

    def __init__(self, counters: Iterable[Tensor], names: Mapping[int, str] | None = None) -> None:
        self.counters = list(counters)
        self._names = names or {}
        self.counted: dict[int, int] = {}
        self.moved: set[int] = set()
        self._calls: dict[int, int] = {}

    def name(self, mean: Tensor | None, weight: Tensor | None) -> str:
        """Return the path of the module that owns these tensors; "" where none is recorded."""
        return self._names.get(id(mean)) or self._names.get(id(weight)) or ""

    def all(self) -> dict[int, int | None]:
        """Return id of a moved tensor -> None for statistics, forwards for a counter."""
        return dict.fromkeys(self.moved) | self.counted

    def move(
        self,
        total: Moments,
        mean: Tensor | None,
        var: Tensor | None,
        momentum: float,
        calls: dict[int, int],
    ) -> None:
        """Move running statistics by those of the full batch, for the first part that arrives.

        Args:
            total: of the full batch.
            mean: [C], or None.
            var: [C], or None.
            momentum: the share of the new statistics.
            calls: id of a running mean -> how often this part has requested it.
        """
        if mean is None or var is None:
            return
        mine = calls[id(mean)] = calls.get(id(mean), 0) + 1
        # Statistics move once a step, for the first lane
        # (test_it_normalises_by_the_full_batch_and_moves_its_statistics_once_a_step).
        if mine <= self._calls.get(id(mean), 0):
            return
        self._calls[id(mean)] = mine
        self.moved |= {id(mean), id(var)}
        mean.mul_(1 - momentum).add_(total.mean.to(mean.dtype), alpha=momentum)
        unbiased = total.squares / (total.count - 1)
        var.mul_(1 - momentum).add_(unbiased.to(var.dtype), alpha=momentum)


class MeetingNorms(Norms):
    """While it is on, training-mode batch normalisation of this thread is that of all parts.

    Args:
        tracked: shared by all parts.
        keep: called with tensors whose memory is read below all modes. Default: not called.
        empty: the rows have weight 0: they count nothing, and nothing flows back. Default False.
        moments: of rows; default `moments_of`. A rehearsal needs their shapes only.
        route: checks forward against the inspected sites; None (default) accepts any.
        singles: forward has normalised each of several samples by itself, too. Default False.

    Attributes:
        again: this is a recomputation, so no statistics move.
        empty: as given.
    """

    def __init__(
        self,
        tracked: Tracked,
        keep: Callable[[Tensor], None] | None = None,
        *,
        empty: bool = False,
        moments: Callable[[Tensor], Moments] = moments_of,
        route: Route | None = None,
        singles: bool = False,
    ) -> None:
        super().__init__(tracked.counters)
        self._route, self._singles = route, singles
        self.again, self.empty = False, empty
        self._tracked, self._keep, self._moments = tracked, keep, moments
        self._mine: dict[int, int] = {}
        self._moved: dict[int, int] = {}

    def __enter__(self) -> MeetingNorms:
        """Intercept beneath the function modes that are on: theirs is the call of the model."""
        # A mode that heard the kernels of a normalisation instead would change its value alone
        # (test_function_modes_of_a_person_hear_what_the_model_calls).
        with _aside(len(_get_current_function_mode_stack())):  # type: ignore[no-untyped-call]
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        """Exit beneath the same modes."""
        stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        above = next((k for k, mode in enumerate(reversed(stack)) if mode is self), 0)
        with _aside(above):
            super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def normalise(
        self,
        x: Tensor,
        running: tuple[Tensor | None, Tensor | None],
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Return [n, C, ...] normalised by the moments of all parts."""
        self.meets(site_of(x))
        own = weight is not None and weight.is_leaf  # else it is made anew by each part
        key = id(running[0]), id(weight) if own else None
        name = self._tracked.name(running[0], weight if own else None)
        place = BatchPlace(name, key, empty=self.empty)
        out, total = batch_norm(x, weight, bias, eps, place, self._moments)
        for shared in (total.mean, total.squares, total.variance):
            self.escapes(shared)  # by all parts, and read past all modes
        if not self.again:
            with torch.no_grad():
                self._tracked.move(total, *running, momentum, self._moved)
        return out

    def meets(self, site: Site) -> None:
        """Take in a place of forward where samples meet."""
        if self._route is not None:
            self._route.comes_to(site)

    def arrives(self) -> None:
        """Record the end of forward: later places are not checked against the route."""
        self.meets(END)
        self._route = None

    def by_itself(self, x: Tensor) -> bool:
        """Return whether samples are normalised singly; refuse one sample where that is unknown."""
        found = super().by_itself(x)
        if self._singles and x.shape[0] == 1 and self.samples == 1:
            raise NotExactError(
                "a micro-batch must have two samples at least where a model with BatchNorm also "
                "calls batch_norm on one row of n * C channels (each sample by itself), and one "
                "has a single sample, where the two cannot be distinguished: give another "
                "micro_batch, or call instance_norm for it"
            )
        return found

    def escapes(self, tensor: Tensor) -> None:
        """Bring it back for good."""
        if self._keep is not None:
            with torch._C.DisableTorchFunction():
                self._keep(tensor)

    def counts(self, counter: Tensor) -> bool:
        """Say whether this call is the first of its number: the others find it counted."""
        if self.again:
            return False
        calls = self._mine[id(counter)] = self._mine.get(id(counter), 0) + 1
        if calls <= self._tracked.counted.get(id(counter), 0):
            return False
        self._tracked.counted[id(counter)] = calls
        return True


@contextmanager
def _aside(count: int) -> Iterator[None]:
    """Take the uppermost function modes of this thread off for the body."""
    above = [_pop_mode() for _ in range(count)]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for mode in reversed(above):
            _push_mode(mode)  # type: ignore[no-untyped-call]


class BatchPlace(NamedTuple):
    """The layer that normalises, as other parts of the batch know it.

    Attributes:
        name: the path of the module; "" if unknown.
        key: identifies the layer within a process.
        empty: the rows of this part are there for the form only.
    """

    name: str = ""
    key: Any = None
    empty: bool = False


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer: BatchPlace | None = None,
    moments: Callable[[Tensor], Moments] = moments_of,
) -> tuple[Tensor, Moments]:
    """Normalise [n, C, ...] by the moments of all parts of the batch.

    Args:
        x: this part.
        weight: [C], or None.
        bias: [C], or None.
        eps: added to the variance.
        layer: identifies the layer; other parts must be in the same one. Default: the only one.
        moments: of rows. Default `moments_of`.

    Returns:
        The part normalised, and the moments.

    Raises:
        ValueError: the full batch has one value a channel.
    """
    layer = layer or BatchPlace()

    def finish(total: Moments) -> Moments:
        if total.count == 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{tuple(x.shape)}"
            )
        return total.to(x.device, accumulated(x.dtype))

    with torch.no_grad():
        words = f"batch normalisation of {x.shape[1]} channels in {x.dim()} dimensions of {x.dtype}"
        words += f" ({layer.name})" if layer.name else ""
        rows = x.detach()  # a kernel: what is away comes back

        def part() -> Moments:
            with Unseen(rows):
                return moments(rows[:0] if layer.empty else rows)

        total = reduce(BarrierKey(words, (layer.key, eps)), part, _together, finish)
    out: Tensor = _Normalise.apply(x, weight, bias, total, eps, layer)  # type: ignore[no-untyped-call]
    return out, total


def _together(one: Moments, other: Moments) -> Moments:
    with Unseen(one.mean, other.mean):
        return merged(one, other)


class BarrierKey(NamedTuple):
    """Place where parts meet: its words, and a key that separates places of the same words."""

    words: str
    which: Any

    def __str__(self) -> str:
        return self.words


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        total: Moments,
        eps: float,
        layer: BatchPlace,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total, ctx.eps, ctx.layer, ctx.meeting = total, eps, layer, here()
        if not x.numel():  # no rows of this part
            return x.clone()
        wide = _wide(weight, x.dtype), _wide(bias, x.dtype)
        return F.batch_norm(x, total.mean, total.variance, *wide, False, 0.0, eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # Outside of an engine the barrier of forward is over by now
        # (test_it_is_the_layer_of_one_process_with_all_rows), and a mode would intercept every line
        # (test_the_lines_of_its_backward_are_not_heard).
        with meeting_in(ctx.meeting):
            x, weight = ctx.saved_tensors  # a checkpoint computes them anew, with all modes on
            with torch._C.DisableTorchFunction():
                return _backward(ctx, x, weight, dy)


def _backward(ctx: Any, x: Tensor, own: Tensor | None, dy: Tensor) -> tuple[Tensor | None, ...]:
    weight = _wide(own, x.dtype)
    total, needs = ctx.total, ctx.needs_input_grad
    words = f"the backward of {x.shape[1]} channels"
    words += f" ({ctx.layer.name})" if ctx.layer.name else ""
    place = BarrierKey(words, id(total))

    def finish(sums: Tensor) -> Tensor:
        with Unseen(sums):
            inverse = (total.variance + ctx.eps).rsqrt()
            return torch.stack([inverse, *(sums * inverse).div_(-total.count)])

    # The rows of a rank without samples must add nothing to the sums
    # (test_batchnorm_is_that_of_all_ranks).
    if not x.numel() or ctx.layer.empty:  # the kernel would divide by the number of values
        with Unseen(dy):  # who waits may send away what a mode has seen being made
            zeros = dy.new_zeros((2, x.shape[1]), dtype=accumulated(x.dtype))
        if needs[0]:
            reduce(place, lambda: zeros, _added, finish)
        none = (zeros[0].clone() if need else None for need in needs[1:3])
        return (torch.zeros_like(dy) if needs[0] else None, *none, None, None, None)
    dy, x = standard(dy), standard(x)  # of one row torch's kernel is wrong without
    ones, saved = weight, None
    if not of(x.device).host:  # CUDA's kernel takes no None, and without weights it has no sums
        with Unseen(x):
            saved = x.new_empty(0, dtype=total.mean.dtype)
            ones = torch.ones_like(total.mean) if weight is None else weight
    _, dw, db = torch.ops.aten.native_batch_norm_backward(
        *(dy, x, ones, total.mean, total.variance, saved, saved, False, ctx.eps),
        [False, True, True],
    )
    dx = None
    if needs[0]:

        def part() -> Tensor:
            with Unseen(db, dw):
                return torch.stack([db, dw])

        dx = _to_input(x, dy, weight, total, ctx.eps, reduce(place, part, _added, finish))
    return dx, dw if needs[1] else None, db if needs[2] else None, None, None, None


def _to_input(
    x: Tensor, dy: Tensor, weight: Tensor | None, total: Moments, eps: float, factors: Tensor
) -> Tensor:
    """Return the gradient of x.

    The term with x is a normalisation with other weights, and torch has a kernel for that.

    Args:
        x: rows of this part.
        dy: the gradient of their result.
        weight: [C], or None.
        total: moments of all parts.
        eps: added to the variance.
        factors: [3, C]: 1 / sqrt(var + eps), and that times -S1 / N and -S2 / N.
    """
    # A kernel reloads the weight: in half precision it is a copy that may be offloaded
    # (test_in_half_precision_all_that_waits_may_be_offloaded).
    own = None if weight is None else weight.detach()
    with paged().here_for(own), Unseen(factors, *(() if own is None else (own,))):
        scale, shift, slope = (factors if own is None else factors * own).unbind()
        along = scale.view([1, -1] + [1] * (x.dim() - 2))
    dtype = accumulated(x.dtype)  # half precision is computed in float32, and rounded once
    dx = F.batch_norm(x.to(dtype), total.mean, total.variance, slope, shift, False, 0.0, eps)
    return dx.addcmul_(dy.to(dtype), along).to(x.dtype)


def _wide(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return weights in the dtype that the kernel takes with rows of `dtype`."""
    return tensor if tensor is None else tensor.to(accumulated(dtype))


def _added(one: Tensor, other: Tensor) -> Tensor:
    with Unseen(one, other):
        return one + other


# Batch normalisation that a model begins to call in a later step, detected without a mode.
#
# The inspection traces the calls of the first forward. A bare ``F.batch_norm`` behind a flag that
# is switched on later would normalise each micro-batch by itself. A mode would find that, at a cost
# for every call. But ``F.batch_norm``, however a model has imported it, looks ``torch.batch_norm``
# up when it is called: while a divided step runs, that attribute is replaced, which costs a
# comparison, and no compiled model is compiled anew for it.
#
#     F.batch_norm, nn.BatchNorm ──> torch.batch_norm ──> training, with a part of the batch: found
#                                                     └─> torch's own
#
# Not found are references to ``torch.batch_norm`` itself from before the step (``from torch
# import``), calls from C++ (a scripted model), and code compiled outside of a divided step.

TRAINING = {"batch_norm": 5, "native_batch_norm": 5}
"""Functions of torch, and where they take their training flag."""


SINGLE = "Expected more than 1 value per channel when training"
"""Error of ``F.batch_norm`` for a single sample, before it calls anything."""


class _ThreadStep(threading.local):
    step: BatchNormDetector | None = None


_HERE = _ThreadStep()
_LOCK = threading.Lock()
_DETECTORS: set[BatchNormDetector] = set()
_OWN: dict[str, Any] = {}


class Singles:
    """Count of the calls in which a forward has normalised each sample by itself, at most.

    That is one row of n * C channels (AdaIN); for a single sample it equals a batch of one.
    """

    def __init__(self) -> None:
        self._most = self._forward = self._calls = 0

    def takes(self, x: Tensor) -> bool:
        """Say whether `x` is such a row, among all of the present forward."""
        if x.shape[0] != 1:
            return False
        if self._forward != forwards_here():
            self._forward, self._calls = forwards_here(), 0
        self._calls += 1
        if samples_here() != 1:
            self._most = max(self._most, self._calls)
        return self._calls <= self._most


class BatchNormDetector:
    """Context that refuses training-mode batch normalisation of a part of a batch in its body.

    Several steps may be in one at a time, each in a thread of its own.

    Args:
        before: the step; it undoes a replacement that an interrupt has left.
        singles: of its model.

    Attributes:
        called: the called function; "" where none was.

    Raises:
        BatchStatisticsError: from the call, and from the end of the body at the latest.
    """

    def __init__(self, before: Before, singles: Singles) -> None:
        self.called = ""
        self.singles, self._before, self._outer = singles, before, _HERE.step

    def __enter__(self) -> None:
        self._before.patched.append(self.end)
        # They would hold each other, and gradients
        # (test_the_error_that_goes_out_holds_no_tensor_of_the_step).
        del self._before
        with uninterrupted():  # or the lock would be left
            _HERE.step = self
            with _LOCK:
                _DETECTORS.add(self)
                for name, at in TRAINING.items():
                    if name not in _OWN:
                        own = _OWN[name] = getattr(torch, name)
                        setattr(torch, name, _with_detection(name, own, at))

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        with uninterrupted():
            self.end()
        interrupted = error is not None and not isinstance(error, Exception)
        if interrupted or isinstance(error, BatchStatisticsError):
            return
        # An error may be of a compiler that has tried to trace the call.
        if self.called or (isinstance(error, ValueError) and str(error).startswith(SINGLE)):
            _refuse(self.called or "batch_norm")

    def end(self) -> None:
        """Restore torch's functions where no other step needs the detection."""
        _HERE.step = self._outer
        with _LOCK:
            _DETECTORS.discard(self)
            while _OWN and not _DETECTORS:
                name, own = _OWN.popitem()
                setattr(torch, name, own)


@lru_cache(maxsize=len(TRAINING))
def _with_detection(name: str, own: Callable[..., Any], at: int) -> Callable[..., Any]:
    def stands_in(*args: Any, **kwargs: Any) -> Any:
        if args[at] if len(args) > at else kwargs.get("training"):
            _detect(name, args[0] if args else kwargs["input"])
        return own(*args, **kwargs)

    return stands_in


def _detect(name: str, x: Tensor) -> None:
    """Refuse to normalise samples of a part of the batch.

    Raises:
        BatchStatisticsError: it is, and records that, even if the error is caught.
    """
    step = _HERE.step
    if step is not None and standalone_here() and not step.singles.takes(x):
        step.called = name
        _refuse(name)


def _refuse(name: str) -> NoReturn:
    refuse(f"{name} called in forward")


# Errors of torch on batch normalisation of a part of a batch, in words that name the batch.

TWICE = "marked with @once_differentiable"


@contextmanager
def values_of_a_part() -> Iterator[None]:
    """Translate torch's error for one value a channel, where the full batch has several samples."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(SINGLE):
            raise
        why = "it has one value a channel"
        raise NotExactError(other_rows("a call in forward", why)) from error
    except RuntimeError as error:
        if TWICE not in str(error):
            raise
        raise NotExactError(
            "BatchNorm must be differentiated once where micro-batches wait for each other, and "
            "this step differentiates it twice (a gradient penalty, torch.autograd.grad with "
            "create_graph=True). Call eval() on it or give micro_batch >= the batch size"
        ) from error
