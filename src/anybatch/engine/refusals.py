"""Refusals of invalid arguments and steps: each error names the rule, the value and the fix."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from anybatch.core.accelerators import require_generators
from anybatch.core.meeting import in_a_meeting
from anybatch.engine.rank_session import several
from anybatch.errors import AnybatchError, NotExactError, NotYetError
from anybatch.lockstep.adaptive import Adaptive
from anybatch.memory.paged import paged


def refuse_now(model: Any, micro_batch: Any, batchnorm: Any, rng: str) -> None:
    """Refuse arguments that mean nothing."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, and it is {type(model).__name__}")
    integer = isinstance(micro_batch, int) and not isinstance(micro_batch, bool)
    if micro_batch is not None and (not integer or micro_batch < 1):
        raise ValueError(f"micro_batch must be a whole number >= 1, and it is {micro_batch!r}")
    if batchnorm not in ("exact", "local", "adaptive") and not isinstance(batchnorm, Adaptive):
        raise ValueError(
            'batchnorm must be "exact", "local", "adaptive" or an anybatch.Adaptive, and it is '
            f"{batchnorm!r}"
        )
    if rng not in ("micro_batch", "batch"):
        raise ValueError(f'rng must be "micro_batch" or "batch", and it is {rng!r}')


def as_function(loss_fn: Any) -> Callable[..., Tensor]:
    """Return `loss_fn`, which must be one that can be called."""
    if not callable(loss_fn):
        raise TypeError(
            "loss_fn must be a function of (outputs, targets) or an anybatch.Loss, and it is "
            f"{type(loss_fn).__name__}"
        )
    checked: Callable[..., Tensor] = loss_fn
    return checked


def refuse_nested(code: CodeType) -> None:
    """Refuse a step that begins inside another one, in its observer for instance.

    The stack is searched: a flag would remain set after an interrupt at the wrong instruction.

    Args:
        code: that of the calling method.
    """
    inside = in_a_meeting()
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is code or inside:
            raise AnybatchError(
                "a step must end before another one begins, and engine.backward was called inside "
                "engine.backward, most likely by observe: store its inputs and call it afterwards"
            )
        frame = frame.f_back


def versions_of(leaves: list[Tensor]) -> list[int]:
    """Return torch's count of the writes to each leaf that has data yet."""
    return [
        0 if leaf.is_inference() else leaf._version
        for leaf in leaves
        if type(leaf) is not UninitializedParameter
    ]


def refuse_written(leaves: list[Tensor], versions: list[int]) -> None:
    """Refuse a step that wrote to a parameter: later micro-batches used another model.

    The write cannot be undone here: no copy of the parameters exists.
    """
    if versions_of(leaves) == versions:
        return
    if len(versions) == len(leaves):  # else lazy parameters have been made on the way
        changed = [
            p for p, before in zip(leaves, versions, strict=True) if versions_of([p]) != [before]
        ]
        raise NotExactError(
            f"parameters must not change before the full batch is done, and {len(changed)} of them "
            f"were written to during the step, the first of shape {tuple(changed[0].shape)}, by a "
            "gradient hook, by forward or by the loss; these writes were not undone. Update them "
            "after engine.backward; make a tensor that the loss itself updates a buffer, or a "
            "parameter with requires_grad=False"
        )


def refuse_place(device: torch.device, *, outside: bool) -> None:
    """Refuse a step with parameters resident against its plan, or offloaded over ranks.

    Args:
        device: of the model; it must have random generators that can be stored.
        outside: the plan offloads them, and the step is outside of that context.
    """
    require_generators(device)
    if outside:
        raise ValueError(
            "a plan that offloads parameters needs a training inside `with engine.states:`, and "
            "this step is outside: put that around the whole training"
        )
    if paged().every and several():
        raise NotYetError(
            "parameters cannot be offloaded over several ranks today: offload only the "
            "optimizer's state (offload_states without model=), or shard the parameters over the "
            "ranks (FSDP2)"
        )
