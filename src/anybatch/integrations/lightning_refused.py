"""Refusals of Lightning `Trainer` features that the callback does not support, before training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from anybatch.errors import NotExactError, NotYetError

PRECISIONS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
LINE = "self.manual_backward(full_batch_loss(self, self.my_loss, batch))"
"""Lines to paste in a training_step with manual optimisation."""


def refuse_trainer(trainer: Any, module: Any) -> None:
    """Refuse settings that conflict with the engine's decisions, or are untested.

    Raises:
        ValueError: a step would not be one batch, or the batch be changed.
        NotYetError: not possible today.
    """
    refuse_accumulation(trainer)
    _refuse_places(trainer, module)
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise NotYetError(
            "a batch must be loaded before it is split, and training_step has dataloader_iter: "
            "let it have (batch, batch_idx)"
        )


def refuse_accumulation(trainer: Any) -> None:
    """Refuse a step that is not one batch, whenever that was set.

    Raises:
        ValueError: it is several, or a part of one.
    """
    of_finder = [c for c in trainer.callbacks if isinstance(c, BatchSizeFinder)]
    if of_finder:
        raise ValueError(
            "the batch size must not change, and a BatchSizeFinder reduces it until it fits: "
            'leave it out, and give FullBatch(memory="6GiB") or nothing; its plan finds the '
            "micro-batch"
        )
    scheduled = any(
        isinstance(c, GradientAccumulationScheduler) and set(c.scheduling.values()) != {1}
        for c in trainer.callbacks
    )
    if trainer.accumulate_grad_batches != 1 or scheduled:
        raise ValueError(
            "with FullBatch a step is one batch already, and accumulate_grad_batches is "
            f"{'scheduled' if scheduled else trainer.accumulate_grad_batches}: leave it out, and "
            "make the loader's batch_size as large as the optimisation wants"
        )


def _refuse_places(trainer: Any, module: Any) -> None:
    if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise NotYetError(
            "FullBatch trains on one device, or on several with DDPStrategy, and the strategy is "
            f"{type(trainer.strategy).__name__}: give strategy='auto' or 'ddp'"
        )
    if type(trainer.precision_plugin) not in PRECISIONS:
        raise NotYetError(
            "FullBatch has been tested with 32-true, 64-true, 16-true, bf16-true, 16-mixed and "
            f"bf16-mixed, and the precision is that of {type(trainer.precision_plugin).__name__}: "
            "use one of these"
        )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise NotYetError(
            "a compiled model that computes its own loss is not supported by the engine today: "
            "give the Trainer the module without torch.compile"
        )


@contextmanager
def refusing_zero_grad(module: Any, trainer: Any) -> Iterator[None]:
    """Refuse ``zero_grad`` of a module, its parts or its optimizers in the body: a step runs.

    Raises:
        NotExactError: from ``training_step``, which calls it.
    """
    wrapped = getattr(trainer.strategy, "_lightning_optimizers", ())  # what self.optimizers() gives
    owners = [module, *module.children(), *trainer.optimizers, *wrapped]
    before = [vars(owner).get("zero_grad") for owner in owners]
    for owner in owners:
        vars(owner)["zero_grad"] = _no_zero_grad
    try:
        yield
    finally:
        for owner, own in zip(owners, before, strict=True):
            vars(owner).pop("zero_grad", None)
            if own is not None:
                vars(owner)["zero_grad"] = own


def _no_zero_grad(*_arguments: Any, **_named: Any) -> None:
    raise NotExactError(
        "gradients must not change while micro-batches run, and training_step calls zero_grad, "
        "which clears those of earlier micro-batches: leave it out, because Lightning clears them "
        "before each backward; in manual optimisation, call it outside of the function of "
        "full_batch_loss"
    )


def refuse_backward(*, handed: bool) -> None:
    """Refuse ``manual_backward`` of a loss that the engine did not compute.

    Raises:
        ValueError: none was requested since the last one.
    """
    if not handed:
        raise ValueError(
            "with FullBatch manual_backward needs the loss of the full batch, and this one was "
            "computed in one piece, which cannot be split afterwards: write its lines as a "
            f"method, def my_loss(self, rows), and {LINE}"
        )


def refuse_unreached(*, waits: bool) -> None:
    """Refuse an update if the module's own ``backward`` omits the gradients of the batch.

    Raises:
        NotExactError: they still wait.
    """
    if waits:
        raise NotExactError(
            "backward must reach the loss of the full batch, which delivers its gradients, and "
            "after backward they are not delivered: call loss.backward() without inputs=, or "
            "return None from training_step to skip a batch"
        )
