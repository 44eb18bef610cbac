"""BatchNorm over all ranks for custom training loops, on gloo and on NCCL.

``torch.nn.SyncBatchNorm`` does this on CUDA only, and merges moments of single ranks in float32.
Here a layer asks the same meeting that micro-batches use: counts, means and squared deviations are
gathered and merged by Chan's formula in float64, one collective forward and one backward. Shards
may differ in size, and may be empty.

Source: AGBN, Algorithms 1-5.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from anybatch.core.accelerator import home, wide
from anybatch.core.meeting import meeting_in
from anybatch.core.norm.moments import Moments, merged_in_order
from anybatch.core.undo import uninterrupted
from anybatch.distributed.group import FEW, Group, group_of
from anybatch.errors import NotExactError
from anybatch.lockstep.batchnorm import BatchPlace, batch_norm


class GroupMeeting:
    """All ranks of a group, each with one part.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def exchange(self, key: Any, part: Any, combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Return the result of `combine` on the parts of all ranks, for this rank."""
        del key
        return combine(self._group.objects(part))[self._group.rank]

    def gather(self, key: Any, rows: Tensor) -> tuple[Tensor, int]:
        """Return the rows of all ranks, and where these begin among them."""
        del key
        parts = self._group.objects(rows)
        return torch.cat(parts), sum(map(len, parts[: self._group.rank]))

    def reduce(
        self,
        key: Any,
        part: Callable[[], Any],
        add: Callable[[Any, Any], Any],
        finish: Callable[[Any], Any],
    ) -> Any:
        """Return the result of `finish` on the sum over all ranks, of tensors or of moments."""
        del key
        own = part()
        if isinstance(own, Moments):
            rows = self._group.gather(own.packed())
            return finish(merged_in_order([row.to(home(own.mean.device)) for row in rows], add))
        numbers = wide(own)
        few = own.numel() * self._group.size <= FEW
        total = torch.stack(self._group.gather(numbers)).sum(0) if few else self._group.sum(numbers)
        return finish(total.to(own.device, own.dtype))


class GlobalBatchNorm(_BatchNorm):
    """BatchNorm of [n, C, ...] by the statistics of the rows of all ranks; see `global_batchnorm`.

    Attributes:
        process_group: the ranks; None is all of them.
    """

    process_group: Any = None

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise the rows of this rank.

        Args:
            input: [n, C, ...]; n may differ between ranks, and be 0 on some.
        """
        self._check_input_dim(input)
        # Without running statistics, too, a rank evaluates by itself: others may not reach the
        # barrier (test_a_rank_evaluates_while_no_other_one_does).
        if not self.training or not _several(self.process_group):
            return super().forward(input)
        with meeting_in(GroupMeeting(group_of(self.process_group))):
            place = BatchPlace()
            out, total = batch_norm(input, self.weight, self.bias, self.eps, place)
        if self.track_running_stats:
            self._track(total)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalBatchNorm:
        """Copy the layer for the same ranks: a process group cannot be copied."""
        memo[id(self.process_group)] = self.process_group
        memo[id(self)] = new = GlobalBatchNorm.__new__(GlobalBatchNorm)
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    @torch.no_grad()
    def _track(self, total: Moments) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked)
        mean, var = self.running_mean, self.running_var
        mean.mul_(1 - share).add_(total.mean.to(mean.dtype), alpha=share)
        unbiased = total.squares / (total.count - 1)
        var.mul_(1 - share).add_(unbiased.to(var.dtype), alpha=share)


def global_batchnorm(model: nn.Module, *, group: Any = None) -> nn.Module:
    """Make every BatchNorm of a model normalise by the rows of all ranks.

    Forward and backward are then those of one process with all rows. Gradients of parameters are
    those of the rows of this rank, as in any data-parallel loop. An `Engine` needs no replacement:
    its BatchNorm covers all micro-batches and all ranks anyway. In evaluation mode each rank
    normalises by itself, as in ``SyncBatchNorm``.

    Args:
        model: its ``BatchNorm1d``, ``2d``, ``3d`` and ``SyncBatchNorm`` layers are replaced in
            place, under every name that they have; parameters and buffers do not change.
        group: a process group of ``torch.distributed``, on gloo or NCCL. Default all ranks.

    Returns:
        The model.

    Raises:
        NotExactError: a layer has a forward of its own, parametrized weights, or is lazy.

    Example:
        >>> model = anybatch.global_batchnorm(model)
        >>> model = DistributedDataParallel(model)

    Source: AGBN, Algorithms 1-5.
    """
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm)]
    odd = [f"{name or 'the model'} ({type(m).__name__})" for name, m in layers if not _usual(m)]
    if odd:
        raise NotExactError(
            "global_batchnorm replaces layers with torch's own BatchNorm, and these have a "
            f"forward of their own, parametrized weights, or no parameters yet: {', '.join(odd)}. "
            "Run a batch through lazy layers before; for others use anybatch.Engine, which needs "
            "no layer replaced"
        )
    for _, layer in layers:
        layer.__class__ = GlobalBatchNorm
        layer.process_group = group
    return model


def meeting_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that would meet other ranks by themselves."""
    return [m for m in model.modules() if isinstance(m, GlobalBatchNorm | nn.SyncBatchNorm)]


@contextmanager
def plain(layers: list[nn.Module]) -> Iterator[None]:
    """Let layers that meet other ranks be plain BatchNorm in the body: an engine meets for them."""
    if not layers:
        yield
        return
    try:
        for layer in layers:
            layer.__dict__["forward"] = MethodType(_BatchNorm.forward, layer)
        yield
    finally:
        with uninterrupted():
            for layer in layers:
                layer.__dict__.pop("forward", None)


def _usual(layer: _BatchNorm) -> bool:
    """Return whether a layer does the same as torch's own, and nothing more."""
    torchs = _BatchNorm.forward, nn.SyncBatchNorm.forward, GlobalBatchNorm.forward
    own = type(layer).forward not in torchs or "forward" in vars(layer)
    return not (own or is_parametrized(layer) or isinstance(layer, LazyModuleMixin))


def _several(handle: Any) -> bool:
    there = dist.is_available() and dist.is_initialized()
    return there and dist.get_world_size(handle) > 1
