"""`coupled`: a function of rows that means the whole batch, inside a model that is run on a part.

A loss in which samples meet (Dice, InfoNCE, experts that are to be used evenly) is the engine's to
take where it stands outside the model. Inside of one, in Lightning's ``training_step`` or in what a
language model returns, it would be that of some rows. `coupled` marks it: micro-batches wait for
each other there, the last one takes the value and its gradient once, with the rows of all, and each
goes on with the value and with the gradient of its own rows.

    forward     v = fn(rows of all), the same for all         G = dv / d rows of all, kept
    backward    d own rows = (sum of d v over all who got it) * G[own rows]

The sum makes it exact however the loss of a micro-batch is weighted, as long as the weights are
those of one whole: 1/K each, samples, tokens.
Source: the chain rule; design of this project, sections 5.1 and 5.3.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from anybatch import graph, tree
from anybatch.errors import LossError
from anybatch.gathered import Around, around
from anybatch.loss.declared import scalar
from anybatch.loss.hearing import Hearing
from anybatch.meeting import Meeting, meeting_in, reduce
from anybatch.norm.batchnorm import Place


def coupled(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a loss in which samples meet be that of the whole batch, inside a model.

    Call it in ``forward``, or in Lightning's ``training_step``. Inside a step of an `Engine` the
    batch is that of all micro-batches and all ranks; anywhere else, and where the batch is not
    divided, it is what is given. Outside of the model, as `loss_fn`, nothing has to be marked.

    Args:
        fn: returns a 0-dim tensor. It computes from its arguments, any trees: tensors of shape
            [n, ...] hold rows, which come as those of the whole batch, in its order; a 0-dim tensor
            (a learned scale) belongs to no sample. It draws nothing at random.

    Returns:
        The function, to be called with the rows that are there. Its value is a term of the loss:
        it can be scaled and added to others.

    Raises:
        LossError: `fn` trains something that it was not given, or returns no single number.
        LaneMismatchError: other micro-batches call something else, or with other shapes of a row.

    Example:
        >>> @anybatch.coupled
        ... def dice(probabilities, masks):
        ...     return 1 - 2 * (probabilities * masks).sum() / (probabilities + masks).sum()
    """
    name = getattr(fn, "__name__", type(fn).__name__)

    @wraps(fn, updated=())
    def of_the_whole(*args: Any, **named: Any) -> Tensor:
        place = around(f"coupled {name}")
        hearing = place.mode(Hearing)
        with nullcontext() if hearing is None else hearing.aside():
            value = scalar(_value(fn, name, (args, named), place), name)
        return value if hearing is None else hearing.of_all(value, fn)

    return of_the_whole


class Shared(NamedTuple):
    """What all get: the value, and its gradient for the rows of all and for what has none."""

    value: Tensor
    gradients: list[Tensor | None]


def _value(fn: Callable[..., Tensor], name: str, given: Any, place: Around) -> Tensor:
    """Return ``fn`` of the rows of all, with a gradient for these."""
    args, named = given
    if place.meeting is None and not place.rows:
        return fn(*args, **named)

    def take(every: list[Tensor], trains: list[bool]) -> Shared:
        return _taken(fn, name, given, every, trains)

    own = tree.flat(given)
    found: Tensor = _Coupled.apply(take, name, place, torch.is_grad_enabled(), *own)  # type: ignore[no-untyped-call]
    return found


def _taken(
    fn: Callable[..., Tensor], name: str, given: Any, every: list[Tensor], trains: list[bool]
) -> Shared:
    """Return the value for the rows of all, and its gradients."""
    leaves = [one.detach().requires_grad_(train) for one, train in zip(every, trains, strict=True)]
    left = iter(leaves)
    args, named = tree.map_tensors(lambda _: next(left), given)
    needs = [leaf for leaf in leaves if leaf.requires_grad]
    with torch.set_grad_enabled(bool(needs)), saved_tensors_hooks(_packed, _unpacked):
        value = scalar(fn(*args, **named), name)  # a checkpoint around it would save nothing
    known = set(map(id, needs))
    if any(id(leaf) not in known for leaf in graph.leaves([value])):
        raise LossError(
            f"a coupled function must be given what it trains, and {name} uses a parameter, or a "
            "tensor with a gradient, that is none of its arguments: pass it as an argument, a "
            "scale as a 0-dim tensor"
        )
    found = iter(
        torch.autograd.grad(value, needs, allow_unused=True) if value.requires_grad else ()
    )
    return Shared(
        value.detach(), [next(found, None) if leaf.requires_grad else None for leaf in leaves]
    )


def _packed(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor.detach(), tensor._version


def _unpacked(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "what a coupled function computes its gradient from must stay as it is, and it has "
            f"changed a tensor of shape {tuple(tensor.shape)} in place: write y = y + 1, not y += 1"
        )
    return tensor


class _Coupled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        take: Callable[[list[Tensor], list[bool]], Shared],
        name: str,
        place: Around,
        grad: bool,  # noqa: FBT001
        *own: Tensor,
    ) -> Tensor:
        trains = [grad and need for need in ctx.needs_input_grad[4:]]
        ctx.words = f"coupled {name}"
        ctx.meeting, ctx.empty = place.meeting, place.empty
        if place.meeting is None:
            pairs = [place.stand_in(one, grad=grad) for one in own]
            ctx.begins, ctx.kept = [0] * len(own), [others for _, others in pairs]
            shared = take([every for every, _ in pairs], trains)
        else:
            every, ctx.begins = _of_all(ctx.words, own, place.meeting, empty=place.empty)
            shared = place.meeting.exchange(
                Place(ctx.words, "take"), None, lambda parts: [take(every, trains)] * len(parts)
            )
        ctx.sizes = [len(one) if one.dim() else None for one in own]
        ctx.gradients = shared.gradients
        return shared.value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor | None, ...]:
        with meeting_in(ctx.meeting):
            part = torch.zeros_like(u) if ctx.empty else u
            total = reduce(Place(f"the backward of {ctx.words}", "take"), part, torch.add, _same)
        found = [
            None if g is None else _own(g, begin, size, part, total, empty=ctx.empty)
            for g, begin, size in zip(ctx.gradients, ctx.begins, ctx.sizes, strict=True)
        ]
        return None, None, None, None, *found


def _of_all(
    words: str, own: tuple[Tensor, ...], meeting: Meeting, *, empty: bool
) -> tuple[list[Tensor], list[int]]:
    """Return the rows of all for each tensor, and where one's own begin among them."""
    found = []
    for index, one in enumerate(own):
        if not one.dim():
            found.append((one.detach(), 0))
            continue
        shape = ", ".join(map(str, one.shape[1:]))
        place = Place(f"{words}, with [n, {shape}] of {one.dtype}", index)
        rows = one.detach()
        found.append(meeting.gather(place, rows[:0] if empty else rows))
    return [every for every, _ in found], [begin for _, begin in found]


def _own(
    gradient: Tensor, begin: int, size: int | None, part: Tensor, total: Tensor, *, empty: bool
) -> Tensor:
    """Return the gradient of what was given, where that of the value is known."""
    if size is None:
        return gradient * part
    if empty:
        return gradient.new_zeros((size, *gradient.shape[1:]))
    return gradient[begin : begin + size] * total


def _same(tensor: Tensor) -> Tensor:
    return tensor
