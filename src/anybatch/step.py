"""One step as the mechanisms see it: micro-batches in, forward, backward, gradients out.

Streaming and gathering order these verbs differently; what a verb means stands here once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from anybatch import tree
from anybatch.batch import Batch, MicroBatch, TensorBatch, count_micro_batches
from anybatch.batchnorm import NoBatchNorm
from anybatch.buffers import ForwardBuffers
from anybatch.device import Link, feed
from anybatch.errors import LossError
from anybatch.gradients import Gradients
from anybatch.loss.declared import Loss, Scope

Observer = Callable[[Any, Any], None]


class Scaler(Protocol):
    """What of ``torch.amp.GradScaler`` a step needs."""

    def scale(self, outputs: Tensor) -> Tensor:
        """Return the tensor times the present scale."""


@dataclass
class Step:
    """A mini-batch on its way through the model.

    Attributes:
        gradients: where gradients come together; None runs forward only.
        watch: look for a bare ``F.batch_norm`` in forward (first step of a signature).
        local: BatchNorm layers that normalise each micro-batch by itself.
        found: what the mechanism found the loss to be, in words.
    """

    model: nn.Module
    loss: Loss
    batch: Batch
    micro_batch: int
    link: Link
    buffers: ForwardBuffers
    gradients: Gradients | None
    scaler: Scaler | None = None
    observe: Observer | None = None
    watch: bool = False
    local: int = 0
    found: str = ""

    @property
    def count(self) -> int:
        """N_S, the number of micro-batches."""
        return count_micro_batches(self.batch.size, self.micro_batch)

    def feed(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches on the device."""
        return feed(self.batch.micro_batches(self.micro_batch), self.link)

    def scope(self, outputs: Any, first: MicroBatch) -> Scope:
        """Return what is known of the whole batch after its first forward."""
        whole = self.batch if isinstance(self.batch, TensorBatch) else None
        return Scope(self.batch.size, self.count, whole, outputs, first)

    def forward(self, micro: MicroBatch) -> Any:
        """Run the model on a micro-batch, its buffers as the undivided batch would find them."""
        if self.count == 1:
            return call_model(self.model, micro.inputs)
        self.buffers.before()
        mode: AbstractContextManager[Any] = NoBatchNorm() if self.watch else nullcontext()
        with mode:
            outputs = call_model(self.model, micro.inputs)
        self.watch = False
        self.buffers.after()
        return outputs

    def backward(self, losses: list[Tensor], weights: list[Tensor]) -> int:
        """Accumulate the gradient of ``sum weights * losses``, scaled where there is a scaler.

        Returns:
            How many of `losses` have a gradient.
        """
        if self.scaler is not None and self.gradients is not None:
            weights = [self.scaler.scale(weight).to(weight.dtype) for weight in weights]
        return self.pull(losses, weights)

    def pull(self, roots: list[Tensor], gradients: list[Tensor]) -> int:
        """Accumulate what flows back from `gradients` of `roots`; return how many do.

        Roots without a graph are left out.
        """
        pairs = [(r, g) for r, g in zip(roots, gradients, strict=True) if r.requires_grad]
        if self.gradients is None or not pairs:
            return 0
        with _outside_autocast(pairs[0][0].device.type):
            torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        self.gradients.collect()
        return len(pairs)

    def finish(self, factor: float | Tensor = 1.0) -> None:
        """Make the sum of the gradients ready, times `factor`."""
        if self.gradients is not None:
            self.gradients.finish(factor)

    def show(self, outputs: Any, micro: MicroBatch) -> None:
        """Let the observer see a micro-batch that is done."""
        if self.observe is not None:
            self.observe(tree.map_tensors(Tensor.detach, outputs), micro.targets)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call `model` with a tensor, the items of a tuple or list, or the keywords of a mapping."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields"):
        return model(*inputs)
    return model(inputs)


def check_trains(roots_with_grad: int) -> None:
    """Refuse a loss that no parameter can lower."""
    if roots_with_grad == 0:
        raise LossError(
            "the loss must depend on a parameter that requires grad, and no micro-batch's does: "
            "unfreeze a parameter, or call engine.evaluate"
        )


def _outside_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Backward runs outside autocast, as torch advises; forward chose the dtypes."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
