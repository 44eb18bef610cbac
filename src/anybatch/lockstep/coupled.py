"""`coupled`: a function over rows of the full batch, inside a model that runs on a micro-batch.

A loss in which samples meet (Dice, InfoNCE, the balance of experts) is computed by the engine if it
is outside the model. Inside of one, in Lightning's ``training_step`` or in the loss that a language
model returns, it would be that of some rows. `coupled` marks it: micro-batches wait for each other
there, the last one computes the value and its gradient once, with the rows of all, and each
continues with the value and with the gradient of its own rows.

    forward     v = fn(rows of all), the same for all         G = dv / d rows of all, kept
    backward    d own rows = (sum of d v over all who got it) * G[own rows]

The sum makes it exact for any weights of the losses of micro-batches that add up to 1: 1/K each,
samples, tokens. Source: the chain rule.
"""

from __future__ import annotations

import cmath
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from anybatch.core import modules, pytree
from anybatch.core.accelerator import home
from anybatch.core.barrier import as_it_is, in_forward, looks_here, meeting_in, reduce
from anybatch.core.norm import NonReducingNorms
from anybatch.errors import LossError, NotExactError
from anybatch.execution.step import NO_GRAPH
from anybatch.lockstep.batchnorm import BarrierKey
from anybatch.lockstep.captured import CapturedSamples, held
from anybatch.lockstep.gathered import Around, around, same
from anybatch.loss.base import scalar
from anybatch.loss.model_trace import TracingMode
from anybatch.memory.fakes import is_fake


def coupled(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute a loss that couples samples over the full batch, inside a model.

    Call it in ``forward``, or in Lightning's ``training_step``. Inside a step of an `Engine` the
    batch is that of all micro-batches and all ranks. Anywhere else, and where the batch is not
    divided, the batch is the rows passed. A `loss_fn` outside the model needs no mark.

    Args:
        fn: returns a 0-dim tensor, computed from its arguments, which are any trees. Tensors of
            shape [n, ...] hold rows; `fn` gets those of the full batch, in its order. A 0-dim
            tensor (a learned scale) belongs to no sample. `fn` draws no random numbers. Values in
            its closure or an attribute must be constants that do not come from samples.

    Returns:
        The function, to be called with the rows of the micro-batch. Its value is a term of the
        loss: it can be scaled and added to others.

    Raises:
        LossError: `fn` is not a function, trains a tensor or reads samples that are not among its
            arguments, has an argument that is neither rows nor equal for all, writes to an
            argument, or does not return a single number.
        LockstepError: other micro-batches call another function, or pass rows of other shapes.

    Example:
        >>> @anybatch.coupled
        ... def dice(probabilities, masks):
        ...     return 1 - 2 * (probabilities * masks).sum() / (probabilities + masks).sum()
    """
    if not callable(fn):
        raise LossError(
            "coupled must be called with a function of rows, and it was called with "
            f"{type(fn).__name__}: anybatch.coupled(fn)(outputs, targets)"
        )
    name = getattr(fn, "__name__", type(fn).__name__)

    @wraps(fn, updated=())
    def over_full_batch(*args: Any, **named: Any) -> Tensor:
        place = around(f"coupled {name}")
        tracing = place.mode(TracingMode)
        with nullcontext() if tracing is None else tracing.aside():
            value = scalar(_value(fn, name, (args, named), place), name)
        return value if tracing is None else tracing.of_all(value, fn)

    return over_full_batch


class CoupledResult(NamedTuple):
    """Result for all parts: the value, its gradients for the rows of all, and their scale."""

    value: Tensor
    gradients: list[Tensor | None]
    scale: float


def _value(fn: Callable[..., Tensor], name: str, arguments: Any, place: Around) -> Tensor:
    """Return ``fn`` of the rows of all, with a gradient for these."""
    args, named = arguments
    if place.meeting is None and not place.rows:
        return fn(*args, **named)
    grad = not looks_here()

    did: list[Any] | None = None

    def take(every: list[Tensor], trains: list[bool]) -> CoupledResult:
        return _evaluated(fn, name, arguments, every, trains if grad else None, did)

    own, norms = pytree.flat(arguments), place.mode(NonReducingNorms)
    if norms is not None and place.meeting is None and not any(map(is_fake, own)):
        norms.called.append(record_call(name, fn, arguments, place.part, rows=True))
        did = norms.called[-1].did
    spark = modules.spark(grad=grad)  # all come to backward, whatever they train
    found: Tensor = _Coupled.apply(spark, take, (fn, name), place, arguments, *own)  # type: ignore[no-untyped-call]
    return found


def _evaluated(
    fn: Callable[..., Tensor],
    name: str,
    arguments: Any,
    every: list[Tensor],
    trains: list[bool] | None,
    did: list[Any] | None,
) -> CoupledResult:
    """Return the value for the rows of all, and its gradients; record its kernels in `did`."""
    needed = trains or [False] * len(every)
    leaves = [one.detach().requires_grad_(need) for one, need in zip(every, needed, strict=True)]
    versions, left = [leaf._version for leaf in leaves], iter(leaves)
    args, named = pytree.map_tensors(lambda _: next(left), arguments)
    call: Callable[[], Any] = partial(fn, *args, **named)
    if did is not None:
        did.append(list(map(_rows, every)))
        call = partial(CapturedSamples(leaves, did).run, name, call)
    with as_it_is(), torch.set_grad_enabled(trains is not None):
        with saved_tensors_hooks(_packed, _unpacked):  # a checkpoint around it would save nothing
            value = scalar(call() if trains is not None else _without_graph(call), name)
        _refuse_moved(name, leaves, versions)
        _refuse_hidden(name, leaves, value)
        needs = [leaf for leaf in leaves if leaf.requires_grad]
        found, scale = _gradients(value, needs)
    gradients = iter(found)
    return CoupledResult(
        value.detach(), [next(gradients) if leaf.requires_grad else None for leaf in leaves], scale
    )


def _without_graph(call: Callable[[], Any]) -> Any:
    """Return the result of a call where gradients are off, or refuse one that needs its graph."""
    try:
        return call()
    except RuntimeError as error:
        if modules.NONE not in str(error):
            raise
        raise NotExactError(NO_GRAPH) from error


SCALES = (2.0**15, 2.0**8, 1.0)
"""Factors of gradients in float16 until backward: the first that leaves all finite."""


def _gradients(value: Tensor, needs: list[Tensor]) -> tuple[list[Tensor | None], float]:
    """Return the gradients of a value, times a number, and that number."""
    if not (value.requires_grad and needs):
        return [None] * len(needs), 1.0
    half = any(leaf.dtype == torch.float16 for leaf in needs)
    # Small gradients of a mean round to 0 in float16
    # (test_the_gradient_of_a_half_precision_loss_does_not_vanish).
    for scale in SCALES if half else (1.0,):
        start = torch.full_like(value, scale)
        found = torch.autograd.grad(value, needs, start, retain_graph=half, allow_unused=True)
        if scale == 1.0 or all(bool(g.isfinite().all()) for g in found if g is not None):
            break
    return list(found), scale


def _refuse_moved(name: str, leaves: list[Tensor], versions: list[int]) -> None:
    """Refuse a function that writes to its arguments: no other micro-batch would observe that."""
    if any(leaf._version != before for leaf, before in zip(leaves, versions, strict=True)):
        raise LossError(
            f"a coupled function must not change its arguments, and {name} writes to one of them: "
            "clone it first"
        )


def _refuse_hidden(name: str, leaves: list[Tensor], value: Tensor) -> None:
    """Refuse a function that trains something else than its arguments."""
    leaf_ids = set(map(id, leaves))
    if any(id(leaf) not in leaf_ids for leaf in modules.leaves([value])):
        raise LossError(
            f"a coupled function must have every tensor that it trains as an argument, and {name} "
            "uses a parameter, or a tensor with a gradient, that is none of its arguments: "
            "compute with it before the call, or pass it as an argument, a scale as a 0-dim tensor"
        )


def _packed(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor.detach(), tensor._version


def _unpacked(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "a coupled function must not change the tensors from which its gradient is computed, "
            f"and it has changed a tensor of shape {tuple(tensor.shape)} in place: write y = y + "
            "1, not y += 1"
        )
    return tensor


class _Coupled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        spark: Tensor,
        take: Callable[[list[Tensor], list[bool]], CoupledResult],
        called: tuple[Callable[..., Tensor], str],
        place: Around,
        arguments: Any,
        *own: Tensor,
    ) -> Tensor:
        trains, (fn, name) = list(ctx.needs_input_grad[5:]), called
        ctx.words = f"coupled {name}"
        ctx.meeting, ctx.empty = place.meeting, place.empty
        if place.meeting is None:
            pairs = [place.stand_in(one, grad=spark.requires_grad) for one in own]
            ctx.begins, ctx.retained = [0] * len(own), [others for _, others in pairs]
            shared = take([every for every, _ in pairs], trains)
        else:
            real = not any(map(is_fake, own))  # else there is nothing to compare
            if real:
                meets_alike(name, fn, arguments, place)
            every, ctx.begins = _of_all(ctx.words, own, place)

            def combine(parts: list[tuple[list[bool], list[Any]]]) -> list[CoupledResult]:
                train, rows = zip(*parts, strict=True)
                if real:
                    refuse_constants(name, own, every, place, list(rows))
                return [take(every, [any(some) for some in zip(*train, strict=True)])] * len(parts)

            part = trains, [rows_and_memory(one) for one in own]
            shared = place.meeting.exchange(BarrierKey(ctx.words, "take"), part, combine)
        ctx.sizes = list(map(_rows, own))
        ctx.gradients, ctx.scale, ctx.trains = shared.gradients, shared.scale, trains
        return shared.value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        if in_forward():
            raise LossError(
                f"what is {ctx.words} must be differentiated after forward, with the loss, and "
                "forward has requested its gradient: micro-batches have parts of that only"
            )
        with meeting_in(ctx.meeting):
            part = torch.zeros_like(u) if ctx.empty else u
            backward_place = BarrierKey(f"the backward of {ctx.words}", "take")
            total = reduce(backward_place, lambda: part, torch.add, same)
        columns = zip(ctx.gradients, ctx.begins, ctx.sizes, ctx.trains, strict=True)
        found = [
            # Each lane returns its part of the gradient of a 0-dim argument: the step adds them up
            # (test_it_is_that_of_the_full_batch).
            _own(g, begin, size, (part if size is None else total), ctx) if train else None
            for g, begin, size, train in columns
        ]
        return None, None, None, None, None, *found


def _of_all(words: str, own: tuple[Tensor, ...], place: Around) -> tuple[list[Tensor], list[int]]:
    """Return the rows of all for each tensor, and where one's own begin among them."""
    assert place.meeting is not None
    found = []
    for index, one in enumerate(own):
        if not one.dim():
            found.append((one.detach(), 0))
            continue
        shape = ", ".join(map(str, one.shape[1:]))
        where = BarrierKey(f"{words}, with [n, {shape}] of {one.dtype}", index)
        rows = one.detach()
        found.append(place.meeting.gather(where, rows[:0] if place.empty else rows))
    return [every for every, _ in found], [begin for _, begin in found]


def _own(
    gradient: Tensor | None, begin: int, size: int | None, factor: Tensor, ctx: Any
) -> Tensor | None:
    """Return the gradient of an argument: that of its own rows times that of the value."""
    if gradient is None:
        return None
    if size is not None and ctx.empty:
        return gradient.new_zeros((size, *gradient.shape[1:]))
    own = gradient if size is None else gradient[begin : begin + size]
    if ctx.scale == 1.0:
        return own * factor
    wide: Tensor = own.float() * (factor.float() / float(ctx.scale))
    return wide.to(gradient.dtype)


def _rows(tensor: Tensor) -> int | None:
    return len(tensor) if tensor.dim() else None


# Check of a coupled function's arguments: rows, or the same for all micro-batches and ranks.
#
# The function is called once, with the rows of all in place of one's own. All other arguments are
# those of the micro-batch that happens to call it: a number that differs (``len(rows)``) would be
# that of one of them, and a tensor without rows (class weights, prototypes) would be gathered as if
# it had some, several times. The result shows neither: both are tested before.
#
#     numbers, names, 0-dim tensors    the same for all, or refused
#     tensors [m, ...]                 blocks that are one and the same for all are no rows: refused

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
"""Types whose values can be written down, and compared with those of other processes."""


class CallRecord(NamedTuple):
    """Record of the arguments of a coupled function, except its rows.

    Attributes:
        name: of the function.
        samples: that the model was called with.
        words: paths of all arguments, and printable values; of its closure, too.
        numbers: the 0-dim tensors.
        objects: all else.
        alike: of each tensor with rows how many there are, where all are one and the same; else 0.
        did: the number of rows passed, its kernels and the numbers in them; empty if not inspected.
    """

    name: str
    samples: int
    words: str
    numbers: list[complex]
    objects: list[Any]
    alike: list[int]
    did: list[Any]


def record_call(
    name: str, fn: Callable[..., Any], arguments: Any, samples: int, *, rows: bool = False
) -> CallRecord:
    """Return a record of a function's arguments and held values; `rows` inspects its rows, too."""
    words, numbers, objects, alike = [], [], [], []
    for path, leaf in pytree.leaves(arguments):
        words.append(path)
        if not isinstance(leaf, Tensor):
            words.append(repr(leaf) if isinstance(leaf, PLAIN) else "")
            objects += [] if isinstance(leaf, PLAIN) else [leaf]
        elif not leaf.dim():
            numbers.append(complex(leaf.detach()))
        elif rows:
            alike.append(len(leaf) if bool((leaf == leaf[:1]).all()) else 0)
    for path, leaf in held(fn):
        words += [path, repr(leaf) if isinstance(leaf, PLAIN) else ""]
        objects += [] if isinstance(leaf, PLAIN) else [leaf]
    return CallRecord(name, samples, " ".join(words), numbers, objects, alike, [])


def refuse_looks(calls: list[CallRecord]) -> None:
    """Compare the arguments of coupled functions in two forwards of different numbers of samples.

    Rows that are one and the same may be as many as the samples (a mask) or belong to none (weights
    of one), which micro-batches of one size cannot show; `refuse_constants` covers all others.
    """
    half, odd = divmod(len(calls), 2)
    for full, part in zip(calls[:half], calls[half:], strict=False):
        if odd or full.name != part.name or full.samples == part.samples:
            return
        if full.words != part.words or (full.did[:1] == part.did[:1] and full.did != part.did):
            raise _differs(full.name)
        if not all(map(_close, full.numbers, part.numbers)):  # len(x) as a tensor
            raise _differs(full.name)
        for one, other in zip(full.alike, part.alike, strict=False):
            if one == other and one > 1:
                raise _no_rows(full.name, f"with {one} rows for any number of samples,")


def meets_alike(name: str, fn: Callable[..., Any], arguments: Any, place: Around) -> None:
    """Compare the arguments without rows with those of all other micro-batches."""
    assert place.meeting is not None
    own = record_call(name, fn, arguments, place.part)
    values: list[float] = [zlib.crc32(own.words.encode())]
    for number in own.numbers:
        values += [number.real, number.imag]
    device = next((tensor.device for tensor in pytree.flat(arguments)), torch.device("cpu"))
    row = torch.tensor([values], dtype=torch.float64, device=home(device))
    where = BarrierKey(f"coupled {name}, with {len(own.numbers)} numbers", "alike")
    every, _ = place.meeting.gather(where, row[:0] if place.empty else row)

    def compare(parts: list[list[Any]]) -> list[bool]:
        first = parts[0]
        same = all(all(map(_is, one, first)) and len(one) == len(first) for one in parts)
        return [same] * len(parts)

    same = place.meeting.exchange(BarrierKey(f"coupled {name}", "objects"), own.objects, compare)
    if not (same and bool(((every == every[:1]) | every.isnan()).all())):
        raise _differs(name)


def _differs(name: str) -> LossError:
    return LossError(
        "arguments of a coupled function without rows, and the contents of its closure, must be "
        f"the same in all micro-batches, and {name} was called with other numbers, names or "
        "objects: compute len(rows), means and the like inside of it, where the rows are those of "
        "the whole batch"
    )


def _no_rows(name: str, what: str) -> LossError:
    return LossError(
        "arguments of a coupled function that have a dimension must hold rows, and one of "
        f"{name}, {what} belongs to no sample: let the function reach it without an argument where "
        "it is not trained (functools.partial), or compute with it before the call (similarities "
        "to prototypes, not prototypes; of a weight, fn(weight.square().sum()))"
    )


def _close(one: complex, other: complex) -> bool:
    return cmath.isclose(one, other, rel_tol=1e-6) or (cmath.isnan(one) and cmath.isnan(other))


def _is(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and _equal(one, other))


def _equal(one: Any, other: Any) -> bool:
    try:
        if isinstance(one, Tensor):
            return one.shape == other.shape and torch.equal(one, other)
        if isinstance(one, np.ndarray):
            return np.array_equal(one, other)
        return bool(one == other)
    except (RuntimeError, ValueError, TypeError):
        return False


def rows_and_memory(tensor: Tensor) -> tuple[int, Any]:
    """Return how many rows a tensor has, and where they begin; None for none of its own there."""
    count = len(tensor) if tensor.dim() else 0
    dense = count and tensor.numel() and tensor.layout is torch.strided
    if not dense or tensor.stride(0) == 0:  # one row, shown as several
        return count, None
    return count, (tensor.untyped_storage()._cdata, tensor.storage_offset())


def refuse_constants(
    name: str,
    own: tuple[Tensor, ...],
    every: list[Tensor],
    place: Around,
    parts: list[list[tuple[int, Any]]],
) -> None:
    """Refuse tensors that belong to no sample: parameters, and tensors that all pass alike.

    Rows of an argument may all be equal (a mask of ones), if as many as samples, or twice.

    Args:
        name: of the function.
        own: its tensors, in order.
        every: the rows of all for each of them.
        place: where it is called.
        parts: of each micro-batch, `rows_and_memory` of its tensors.
    """
    for one, full, each in zip(own, every, zip(*parts, strict=True), strict=True):
        if not one.dim() or place.empty:
            continue
        there = [begin for _, begin in each if begin is not None]
        shared = len(set(there)) < len(there) and max(len(one), place.part) > 1
        shared = shared or (one.is_leaf and one.requires_grad)
        as_many = len({count for count, _ in each}) == 1
        if shared or (as_many and _constant(one.detach(), full, place.part)):
            raise _no_rows(name, f"of shape {tuple(one.shape)},")


def _constant(own: Tensor, every: Tensor, samples: int) -> bool:
    count = len(own)
    if not own.numel() or len(every) == count or len(every) % count:
        return False
    blocks = every.reshape(-1, *own.shape)
    if not bool((blocks == own).all()):
        return False
    in_proportion = samples > 0 and count % samples == 0
    alike = not own.is_floating_point() or bool((own == own[:1]).all())
    return not (in_proportion and alike)
