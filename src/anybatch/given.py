"""What a step is given, in the form that the mechanisms want: batch, modules, leaves, its kind.

A person hands over a model, a loss and perhaps an optimizer once, and trees of tensors at every
step. What follows from them alone, without any state of the engine, is here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anybatch import tree
from anybatch.batch import Batch, LazyBatch, TensorBatch
from anybatch.case import MICRO_BATCHES, Case
from anybatch.errors import AnybatchError
from anybatch.loss.declared import Inside, Loss
from anybatch.modules import Modules, parameters, walk
from anybatch.refusals import refuse_ranks
from anybatch.rng import Dice

LOSS = "loss_fn: "
"""What the paths of the modules of the loss begin with."""


@dataclass(frozen=True)
class Given:
    """What stays the same from step to step.

    Attributes:
        model: the person's.
        loss: the loss.
        optimizer: the optimizer, or None.
        batchnorm: "exact" or "local".
        closure: leaves that the loss closes over, found on the way.
    """

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer | None
    batchnorm: str
    closure: list[Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        parameter = next(self.model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def batch(self, inputs: Any, targets: Any) -> Batch:
        """Return the mini-batch of a step."""
        refuse_ranks()
        if not isinstance(inputs, LazyBatch):
            return TensorBatch.of(inputs, targets)
        if targets is not None:
            raise AnybatchError(
                "the targets of a LazyBatch must come from its items, and targets= was given too: "
                "return (input, target) from the data set and leave targets out"
            )
        inputs.paired = not isinstance(self.loss, Inside)
        return inputs

    def modules(self) -> Modules:
        """Return every module that a step runs: the model's, and those of the loss."""
        of_loss = [fn for fn in self.loss.functions() if isinstance(fn, nn.Module)]
        return walk(self.model) + [(LOSS + p, m) for fn in of_loss for p, m in walk(fn)]

    def leaves(self, modules: Modules, batch: Batch) -> list[Tensor]:
        """Return every leaf that may receive a gradient, once."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        given = [] if not isinstance(batch, TensorBatch) else [batch.inputs, batch.targets]
        every = [
            *parameters(modules),
            *self.closure,
            *(p for group in groups for p in group["params"]),
            *(leaf for _, leaf in tree.tensors(given) if leaf.requires_grad),
        ]
        return list({id(p): p for p in every}.values())

    def kinds(self, batch: Batch) -> tuple[Any, ...]:
        """Return path, dimensions and dtype of every tensor of a batch."""
        if not isinstance(batch, TensorBatch):
            return ("lazy",)
        pair = (batch.inputs, batch.targets)
        return tuple((path, t.dim(), t.dtype) for path, t in tree.tensors(pair))

    def case(self, batch: Batch, modules: Modules, *, trains: bool) -> Case:
        """Return what is rehearsed of a step; of a lazy batch a few rows are loaded for it."""
        rows = batch if isinstance(batch, TensorBatch) else _loaded(batch)
        return Case(
            model=self.model,
            loss=self.loss,
            rows=rows,
            size=batch.size,
            lazy=not isinstance(batch, TensorBatch),
            modules=modules,
            leaves=[leaf for leaf in self.leaves(modules, _NOTHING) if not is_lazy(leaf)],
            device=self.device,
            batchnorm=self.batchnorm,
            trains=trains,
        )


def shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    """Return the shape of one row of every tensor of a batch; nothing is known of a lazy one."""
    if not isinstance(batch, TensorBatch):
        return ()
    return tuple(tuple(t.shape[1:]) for _, t in tree.tensors((batch.inputs, batch.targets)))


def _loaded(batch: Batch) -> TensorBatch:
    """Return the first rows of a lazy batch; the dice are put back."""
    dice = Dice.now()
    first = next(iter(batch.micro_batches(min(batch.size, MICRO_BATCHES * MICRO_BATCHES))))
    dice.put_back()
    return TensorBatch(first.inputs, first.targets, first.size)


_NOTHING = TensorBatch(None, None, 0)
