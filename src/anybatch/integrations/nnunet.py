"""`AnyBatchTrainer`: an nnU-Net trainer for any plan within a budget, with its exact gradient.

nnU-Net plans a patch and a batch for a GPU of a size, and has no accumulation: on a smaller card
the plan does not run, and a larger ``batch_size`` runs on none. Accumulation by hand is another
training, because with ``batch_dice`` the Dice is a ratio of sums over all patches of a batch, and
with an ignore label the cross-entropy is divided by the annotated voxels.

Here ``train_step`` is nnU-Net's own, or that of the class which the trainer is mixed with:
autocast, the scaler of gradients, clipping and the optimizer are not written again. While it runs,
the network only hands its batch on, and the loss hands batch and target to one `Engine.backward`:

    self.network(data)          the batch, deferred
    self.loss(output, target)   engine.backward(data, target): the loss of the full batch
    l.backward()                adds it to ``.grad``, times the gradient of the loss

Validation is nnU-Net's own too, on outputs that are computed in micro-batches. Source: nnunetv2
2.8, ``nnUNetTrainer.train_step`` and ``nnUNetTrainer.validation_step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from anybatch.engine.engine import Engine
from anybatch.errors import NotExactError, NotYetError
from anybatch.integrations.handed import Handed
from anybatch.integrations.install import require

require("nnunet", "nnunetv2")

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer  # noqa: E402

USED = (
    "the outputs of the network are computed in micro-batches, in self.loss: a train_step must "
    "pass what self.network(data) returns to self.loss, and it used {} of it; measure in "
    "validation_step, which has the outputs"
)


class AnyBatchTrainer(nnUNetTrainer):  # type: ignore[misc]
    """An nnU-Net trainer with steps that fit in `memory`, and the gradient of the full batch.

    nnU-Net makes trainers itself, by the name of their class: set the budget in a subclass, in a
    file of a folder that the variable ``nnUNet_extTrainer`` names. Mixed with another trainer it
    comes first: ``class Mine(AnyBatchTrainer, nnUNetTrainerBN)``.

    Attributes:
        memory: budget of a step on the device, as for `Engine`; None (default) is what is free.
        micro_batch: patches in a micro-batch; None (default) chooses.
        engine: the `Engine`, with ``engine.plan`` and ``engine.last``; None before the first step.

    Raises:
        ImportError: nnunetv2 is not installed.
        NotExactError: at a step, if a `train_step` uses the outputs of the network other than in
            the loss.
        NotYetError: at the start, on several GPUs.

    Example:
        >>> class Trainer6GiB(AnyBatchTrainer):
        ...     memory = "6GiB"
    """

    network: nn.Module
    loss: Any
    memory: float | str | None = None
    micro_batch: int | None = None
    engine: Engine | None = None
    _parts: tuple[Any, ...] = ()

    def initialize(self) -> None:
        """Make network, loss and optimizer as the next class does, on one GPU."""
        self._refuse_ranks()
        super().initialize()

    def build_engine(self) -> Engine:
        """Return the engine of `network`, `loss` and `optimizer`; override it to pass more.

        It is called again where one of the three is replaced, as trainers with a warm-up do.
        """
        return Engine(
            self.network,
            self.loss,
            optimizer=self.optimizer,
            memory=self.memory,
            micro_batch=self.micro_batch,
        )

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Train on `batch` as the next class does, with the gradient from the engine.

        Args:
            batch: ``data``, and ``target``: one tensor, or one for each scale of deep supervision.

        Returns:
            ``loss``: that of the full batch.
        """
        engine, steps = self._engine(), 0

        def loss(output: Any, target: Any) -> Tensor:
            nonlocal steps
            steps += 1
            if not isinstance(output, Deferred):
                raise NotExactError(USED.format("another value instead"))
            # A train_step may clear gradients or weight the loss before its backward
            # (test_a_step_in_another_order_has_the_gradient_of_its_loss).
            handed = Handed(self.network, [self.optimizer], self.grad_scaler)
            with handed.aside(drop=False):
                value = engine.backward(output.data, target, scaler=self.grad_scaler)
            return handed.loss(value)

        with self._replaced(Deferred, loss):
            found: dict[str, Any] = super().train_step(batch)
        if steps != 1:
            raise NotExactError(
                f"a train_step must call self.loss once, and it was called {steps} times"
            )
        return found

    def validation_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Validate on `batch` as the next class does, with outputs computed in micro-batches."""
        network, last = self.network, None if self.engine is None else self.engine.last
        rows = None if last is None else last.micro_batch

        def forward(data: Tensor) -> Any:
            outputs = [network(part) for part in torch.split(data, rows or len(data))]
            return tree_map(lambda *same: torch.cat(same), *outputs)

        with self._replaced(forward, self.loss):
            found: dict[str, Any] = super().validation_step(batch)
        return found

    def _refuse_ranks(self) -> None:
        """Refuse several processes: the loss of nnU-Net gathers their batches itself.

        Raises:
            NotYetError: there are.
        """
        if self.is_ddp:
            raise NotYetError(
                "AnyBatchTrainer trains on one GPU, and -num_gpus has started several: leave it "
                "out, the batch of the plan fits on one within the budget"
            )

    def _engine(self) -> Engine:
        """Return the engine of the present network, loss and optimizer."""
        self._refuse_ranks()  # a class may initialize in its own way
        parts = self.network, self.loss, self.optimizer
        if self.engine is None or any(a is not b for a, b in zip(parts, self._parts, strict=True)):
            self.engine, self._parts = self.build_engine(), parts
        return self.engine

    @contextmanager
    def _replaced(self, forward: Callable[[Tensor], Any], loss: Any) -> Iterator[None]:
        """Let `network` call `forward`, and `loss` be another one, for a step."""
        network, own = self.network, self.loss
        stand_in: Any = DeferredNetwork(network, forward)
        self.network, self.loss = stand_in, loss
        try:
            yield
        finally:
            self.network, self.loss = network, own


class DeferredNetwork:
    """A network in every respect but its call, which is that of `forward`."""

    def __init__(self, network: nn.Module, forward: Callable[[Tensor], Any]) -> None:
        self._network, self._forward = network, forward

    def __call__(self, data: Tensor) -> Any:
        """Return the outputs of `forward`."""
        return self._forward(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


class Deferred:
    """The batch that a network was called with; nothing but a loss can use it."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __getattr__(self, name: str) -> NoReturn:
        raise NotExactError(USED.format(f".{name}"))

    def __getitem__(self, index: Any) -> NoReturn:
        raise NotExactError(USED.format(f"[{index!r}]"))
