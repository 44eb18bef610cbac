"""`all_gather`: the rows of the whole batch inside a model that is run on some of them.

A model that compares its samples with all others (negatives of a contrastive loss inside the model)
computes something else on a part of the batch. ``torch.distributed`` gathers over ranks; here the
parts are micro-batches as well, which wait for each other, and the gradient of what was gathered
goes back to the rows that it came from.

    forward     whole = [rows of all micro-batches of all ranks], the same for all
    backward    d rows = (sum of d whole over all who got it), the part that is ours

Source: the chain rule; design of this project, section 5.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anybatch.batchnorm import GatherError
from anybatch.guard import Guard
from anybatch.meeting import Meeting, here, meeting_in, reduce
from anybatch.norm.alone import AloneNorms, HeardNorms
from anybatch.norm.batchnorm import MeetingNorms, Place


def all_gather(rows: Tensor) -> tuple[Tensor, int]:
    """Return the rows of the whole batch, and where these begin among them.

    Inside a step of an `Engine` the batch is that of all micro-batches and all ranks. Anywhere
    else, and where the batch is not divided, it is what is given.

    Args:
        rows: [n, ...], one row a sample; all but n must be the same everywhere.

    Returns:
        [N, ...] and b: ``whole[b : b + n]`` are the rows. Gradients flow back to all of them.

    Raises:
        LaneMismatchError: other micro-batches gather something else, or nothing.

    Example:
        >>> class Contrastive(nn.Module):
        ...     def forward(self, x, y):
        ...         z, w = self.encode(x), self.encode(y)
        ...         others, begin = anybatch.all_gather(w)
        ...         own = torch.arange(len(z), device=z.device) + begin
        ...         return F.cross_entropy(z @ others.T, own)
    """
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    alone = [mode for mode in modes if isinstance(mode, AloneNorms)]
    looked_at = any(isinstance(m, Guard) for m in _get_current_dispatch_mode_stack())
    if not alone and (looked_at or any(isinstance(mode, HeardNorms) for mode in modes)):
        raise GatherError("all_gather called in forward")
    meeting = here()
    if alone and alone[0].rows and meeting is None:
        return _stand_in(rows, alone[0].rows), 0
    if meeting is None:
        return rows, 0
    empty = any(isinstance(mode, MeetingNorms) and mode.empty for mode in modes)
    found: tuple[Tensor, int] = _Gather.apply(rows, meeting, empty)  # type: ignore[no-untyped-call]
    return found


def _stand_in(rows: Tensor, size: int) -> Tensor:
    """Return as many rows as the whole batch has, which do not depend on how many these are."""
    if not torch.is_grad_enabled():
        return rows.new_zeros((size, *rows.shape[1:]))
    more = rows.new_zeros((max(0, size - len(rows)), *rows.shape[1:]))
    return torch.cat([rows, more])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, meeting: Meeting, empty: bool) -> tuple[Tensor, int]:  # noqa: FBT001
        shape = ", ".join(map(str, rows.shape[1:]))
        ctx.place = Place(f"all_gather of [n, {shape}] of {rows.dtype}", "gather")
        own = rows.detach()[:0] if empty else rows.detach()
        whole, begin = meeting.gather(ctx.place, own)
        ctx.meeting, ctx.begin, ctx.size, ctx.empty = meeting, begin, len(rows), empty
        return whole.view_as(whole), begin

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        place = Place(f"the backward of {ctx.place}", "gather")
        with meeting_in(ctx.meeting):
            part = torch.zeros_like(gradient) if ctx.empty else gradient
            total = reduce(place, part, torch.add, _same)
        if ctx.empty:
            return total.new_zeros((ctx.size, *total.shape[1:])), None, None
        return total[ctx.begin : ctx.begin + ctx.size].clone(), None, None


def _same(total: Tensor) -> Tensor:
    return total
