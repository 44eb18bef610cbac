"""`gather_batch`: the rows of the full batch, inside a model that runs on some of them.

A model that compares its samples with all others (negatives of a contrastive loss inside the model)
has another result on a part of the batch. ``torch.distributed`` gathers over ranks; here the parts
are micro-batches as well, which wait for each other, and the gradient of the gathered rows flows
back to their sources.

    forward     whole = [rows of all micro-batches of all ranks], the same for all
    backward    d rows = (sum of d whole over all who got it), the part that is ours

Source: the chain rule.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anybatch.core.barrier import (
    Meeting,
    as_it_is,
    here,
    looks_here,
    meeting_in,
    reduce,
    samples_here,
    standalone_here,
)
from anybatch.core.norm import GatherError, NonReducingNorms, RefusedNorms
from anybatch.execution.proof.follow import Follow
from anybatch.execution.signature import bytes_of
from anybatch.lockstep.batchnorm import BarrierKey, MeetingNorms
from anybatch.lockstep.scheduler import Lanes

M = TypeVar("M")


def gather_batch(rows: Tensor) -> tuple[Tensor, int]:
    """Return the rows of the full batch, and the position at which these begin among them.

    Inside a step of an `Engine` the batch is that of all micro-batches and all ranks. Anywhere
    else, and where the batch is not divided, the batch is the rows passed.

    Args:
        rows: [n, ...], one row a sample; all dimensions but n must be the same everywhere.

    Returns:
        [N, ...] and b: ``whole[b : b + n]`` are copies of the rows. Gradients flow back to all
        rows; under ``torch.no_grad()`` to none.

    Raises:
        LockstepError: other micro-batches gather other rows, or none.
        NotExactError: forward writes to the tensor returned, which all micro-batches share.

    Example:
        >>> class Contrastive(nn.Module):
        ...     def forward(self, x, y):
        ...         z, w = self.encode(x), self.encode(y)
        ...         others, begin = anybatch.gather_batch(w)
        ...         own = torch.arange(len(z), device=z.device) + begin
        ...         return F.cross_entropy(z @ others.T, own)
    """
    place = around("gather_batch")
    if place.meeting is None and not place.rows:
        # A copy, as in a divided batch: a write to one is none to the other, and without
        # gradients none flow (test_rows_are_gathered_as_in_a_divided_batch).
        return rows.clone(), 0
    held: list[Tensor] = []
    full, begin = _Gather.apply(rows, place, not looks_here(), held)  # type: ignore[no-untyped-call]
    if full.grad_fn is not None and place.meeting is not None:
        full.grad_fn.register_prehook(partial(_hold, held))
    if isinstance(place.meeting, Lanes):
        place.meeting.share(full)
    return full, begin


def _hold(held: list[Tensor], gradients: tuple[Tensor | None, Any]) -> tuple[Tensor, None] | None:
    """Move the gradient of the full batch's rows to `held`, and return one without memory.

    Autograd holds what it calls a backward with for as long as that runs, and each lane waits in
    it: all of them would have a gradient of all rows
    (test_lanes_that_gather_wait_without_a_gradient_of_all_rows).
    """
    gradient = gradients[0]
    if gradient is None:  # no gradient came; backward gets zeros
        return None
    held[:] = [gradient]
    return gradient.new_zeros(()).expand_as(gradient), None


class Around(NamedTuple):
    """Context of a request for the rows of the full batch.

    Attributes:
        modes: function modes that are on.
        meeting: brings the parts together; None where there are no others.
        rows: of the full batch, in a dry run of a single lane; else 0.
        part: samples that the model was called with.
        empty: the rows are there for the form only, and count nothing.
    """

    modes: list[Any]
    meeting: Meeting | None
    rows: int
    part: int
    empty: bool

    def mode(self, mode_type: type[M]) -> M | None:
        """Return the active mode of this type, or None."""
        return next((mode for mode in self.modes if isinstance(mode, mode_type)), None)

    def stand_in(self, rows: Tensor, *, grad: bool) -> tuple[Tensor, Tensor]:
        """Return as many rows as the full batch has, and those that other parts would have.

        Args:
            rows: of a part.
            grad: without, the result depends neither on the number of rows, nor on their values.
        """
        if not rows.dim():
            return rows.detach(), rows.new_zeros(())
        size, own = -(-self.rows * len(rows) // max(self.part, 1)), rows.detach()
        with as_it_is():  # what is called here is no part of the model
            more = _like(own, max(0, size - len(own)))
            full = torch.cat([own, more]) if grad else _pattern(torch.cat([own, more]))
        norms = self.mode(NonReducingNorms)
        assert norms is not None
        norms.gathered += bytes_of(full)
        return full, more


WAVE = 509
"""Numbers after which a pattern of rows begins again; a prime, or rows would be alike."""


def _pattern(rows: Tensor) -> Tensor:
    """Return rows with values that depend only on their places, and with independent columns."""
    if not rows.is_floating_point():
        return torch.zeros_like(rows)
    wave = torch.arange(WAVE, device=rows.device).square().cos().to(rows.dtype)
    return _repeated(wave, rows.numel()).view(rows.shape)


def _like(rows: Tensor, count: int) -> Tensor:
    """Return `count` rows like these: copies, each scaled a little towards 0.

    The same ones again would be a matrix of few independent rows, which some functions refuse.
    """
    more = _repeated(rows, count)
    return more.mul_(_pattern(more).mul_(0.125).add_(0.875)) if more.is_floating_point() else more


def _repeated(rows: Tensor, count: int) -> Tensor:
    """Return `count` rows: copies of these in order, repeated."""
    if not len(rows):
        return rows.new_zeros((count, *rows.shape[1:]))
    return torch.cat([*[rows] * (count // len(rows)), rows[: count % len(rows)]])


def around(what: str) -> Around:
    """Return the context of a request for the rows of the full batch.

    Raises:
        GatherError: micro-batches do not wait for each other yet; they do when the step, which has
            now found that samples meet in `what`, begins again.
    """
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    norms = next((mode for mode in modes if isinstance(mode, NonReducingNorms)), None)
    looked_at = any(isinstance(m, Follow) for m in _get_current_dispatch_mode_stack())
    looked_at = looked_at or any(isinstance(mode, RefusedNorms) for mode in modes)
    meeting = here()
    if norms is None and (looked_at or (meeting is None and standalone_here())):
        raise GatherError(what)
    rows = 0 if norms is None or meeting is not None or samples_here() < 0 else norms.rows
    meets = next((mode for mode in modes if isinstance(mode, MeetingNorms)), None)
    empty = meets is not None and meets.empty
    if meeting is not None and meets is not None:
        meets.meets((what, 0, 0))
    elif rows and norms is not None:
        norms.meets((what, 0, 0))
    return Around(modes, meeting, rows, samples_here(), empty)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        place: Around,
        grad: bool,  # noqa: FBT001
        held: list[Tensor],
    ) -> tuple[Tensor, int]:
        ctx.meeting, ctx.begin, ctx.size, ctx.empty = place.meeting, 0, len(rows), place.empty
        if place.meeting is None:
            # The rows must exist for as long as any lane needs them.
            ctx.retained = full, _ = place.stand_in(rows, grad=grad)
            return full.detach(), 0
        ctx.held = held
        shape = ", ".join(map(str, rows.shape[1:]))
        ctx.place = BarrierKey(f"gather_batch of [n, {shape}] of {rows.dtype}", "gather")
        own = rows.detach()[:0] if place.empty else rows.detach()
        full, ctx.begin = place.meeting.gather(ctx.place, own)
        return full.detach(), ctx.begin

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        if ctx.meeting is None:
            total = torch.zeros_like(gradient) + gradient  # the sum so far, and the sum after
            return total[: ctx.size].clone(), None, None, None
        place = BarrierKey(f"the backward of {ctx.place}", "gather")
        with meeting_in(ctx.meeting):
            own = ctx.held.pop if ctx.held else lambda: gradient
            part = partial(torch.zeros_like, gradient) if ctx.empty else own
            total = reduce(place, part, torch.add, same)
        if ctx.empty:
            return total.new_zeros((ctx.size, *total.shape[1:])), None, None, None
        return total[ctx.begin : ctx.begin + ctx.size].clone(), None, None, None


def same(total: Tensor) -> Tensor:
    """Return the sum of a barrier as it is."""
    return total
