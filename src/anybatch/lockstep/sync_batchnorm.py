"""BatchNorm over all ranks for custom training loops, and AGBN's policy of when it is used.

``torch.nn.SyncBatchNorm`` does this on CUDA only, and merges moments of single ranks in float32.
Here a layer asks the same meeting that micro-batches use: counts, means and squared deviations are
gathered and merged by Chan's formula in float64, one collective forward and one backward. Shards
may differ in size, and may be empty.

Source: AGBN, Algorithms 1-5.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from anybatch.core.accelerator import home, wide
from anybatch.core.barrier import meeting_in
from anybatch.core.moments import Moments, merged_in_order
from anybatch.core.transaction import uninterrupted
from anybatch.distributed.process_group import FEW, Group, group_of
from anybatch.errors import NotExactError
from anybatch.lockstep.batchnorm import BatchPlace, batch_norm


class GroupMeeting:
    """All ranks of a group, each with one part."""

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


NONE_MEET = nullcontext()
"""The context of a model without such layers."""


def plain(layers: list[nn.Module]) -> AbstractContextManager[None]:
    """Let layers that meet other ranks be plain BatchNorm in the body: an engine meets for them."""
    return _plain(layers) if layers else NONE_MEET


@contextmanager
def _plain(layers: list[nn.Module]) -> Iterator[None]:
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


# AGBN's policy for the steps in which BatchNorm of the full batch is worth its price.
#
# Meeting in every layer costs time, and early in training statistics of a part do as well; a part
# that is large enough does always. So normalisation is local until training converges, and global
# from there on, unless the batch is so large that it need not be.
#
#     local  ── converged, and the batch is smaller than max_batch ──>  global
#
# The criterion uses the loss of the full batch, which all ranks share: all change in the same step.
#
# Source: AGBN, section 4.3.


class Criterion(Protocol):
    """Says whether training has converged, from a metric that falls."""

    def converged(self, value: float) -> bool:
        """Take in the next value of the metric."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the criterion, in plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember that."""


class Plateau:
    """Converged when a metric has not improved for a while, and from then on for ever.

    Args:
        patience: values without an improvement, at least 1. Default 3.
        least: an improvement is a fall by this share of the best value. Default 0.01.

    Raises:
        ValueError: `patience` < 1 or `least` < 0.
    """

    def __init__(self, patience: int = 3, least: float = 0.01) -> None:
        if patience < 1 or not least >= 0:
            raise ValueError(
                f"patience must be >= 1 and least >= 0, and they are {patience!r} and {least!r}"
            )
        self.patience, self.least = patience, least
        self._best, self._waited = math.inf, 0

    def converged(self, value: float) -> bool:
        """Take in the next value, and return whether training has converged.

        Args:
            value: value of the metric; NaN is no improvement.

        Returns:
            Whether training has converged, now or before.
        """
        if self._waited >= self.patience:
            return True
        if value < self._best - self.least * abs(self._best) or self._best == math.inf > value:
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        return self._waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and the number of values since then."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state: the result of `state_dict`.
        """
        self._best, self._waited = state["best"], state["waited"]


class Fixed:
    """One mode for ever.

    Args:
        mode: "exact" or "local".
    """

    def __init__(self, mode: str) -> None:
        self.now = mode

    def choose(self, batch_size: int) -> None:
        """Choose nothing."""

    def step(self, loss: Any) -> None:
        """Learn nothing."""


class Adaptive:
    """``Engine(batchnorm=Adaptive(...))``: local until converged or while the batch is large.

    Args:
        max_batch: samples over all ranks from which on BatchNorm is always local. Default None: no
            batch is that large.
        criterion: says when training has converged. Default ``Plateau()``.
        every: steps whose mean loss is one value of the metric, at least 1. Default 100. If
            `measured` is called, its values are the metric instead.

    Attributes:
        is_converged: the last result of the criterion.
        now: "exact" or "local", as chosen for the last step.

    Raises:
        ValueError: `every` or `max_batch` < 1.

    Source: AGBN, section 4.3: BZ_max and IsConverged.
    """

    def __init__(
        self,
        *,
        max_batch: int | None = None,
        criterion: Criterion | None = None,
        every: int = 100,
    ) -> None:
        if every < 1 or (max_batch is not None and max_batch < 1):
            raise ValueError(
                f"every and max_batch must be >= 1, and they are {every!r} and {max_batch!r}"
            )
        self.max_batch, self.every = max_batch, every
        self.criterion: Criterion = Plateau() if criterion is None else criterion
        self.is_converged = False
        self.now = "local"
        self._losses: list[float] = []
        self._by_hand = False

    def choose(self, batch_size: int) -> None:
        """Choose the mode of the next step; the engine calls this.

        Args:
            batch_size: samples over all ranks.
        """
        small = self.max_batch is None or batch_size < self.max_batch
        self.now = "exact" if self.is_converged and small else "local"

    def step(self, loss: Any) -> None:
        """Take in the loss of a step; the engine calls this.

        Args:
            loss: the loss over all ranks, a number or a 0-dim tensor.
        """
        if self._by_hand or self.is_converged:
            return
        self._losses.append(float(loss))
        if len(self._losses) == self.every:
            mean = sum(self._losses) / self.every
            self._losses.clear()
            self.is_converged = self.criterion.converged(mean)

    def measured(self, value: float) -> None:
        """Take in a metric that falls, such as the validation loss.

        Args:
            value: value of the metric, the same on all ranks.
        """
        self._by_hand = True
        self.is_converged = self.is_converged or self.criterion.converged(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed training needs, in plain values."""
        return {
            "is_converged": self.is_converged,
            "losses": list(self._losses),
            "by_hand": self._by_hand,
            "criterion": self.criterion.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state: the result of `state_dict`.
        """
        self.is_converged, self._by_hand = state["is_converged"], state["by_hand"]
        self._losses = list(state["losses"])
        self.criterion.load_state_dict(state["criterion"])
