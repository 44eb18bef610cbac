"""Trainer of ultralytics with batches of any size, each one exact step within a budget.

A detection batch lies in two forms: images [N, 3, H, W], and the boxes of all images in one tensor
[M, 4] beside the image of each, ``batch_idx`` [M]. The loss divides by the scores that all boxes
of the batch are assigned, and BatchNorm normalises over the batch: accumulation over smaller ones,
which ultralytics does below ``nbs`` images, trains something else. Here each batch of the loader is
one `Engine.backward`:

    preprocess_batch    images stay on the host; boxes become rows by sample (`by_sample`)
    model(batch)        the engine: micro-batches that fit, the criterion once on all outputs
    backward            adds the gradients, times that of the loss
    all else            ultralytics' own: clipping, EMA, warm-up, scaler, checkpoints, validation

Source: ultralytics 8.4, ``BaseTrainer._do_train`` and ``v8DetectionLoss``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anybatch.core.pytree import BySample, by_sample
from anybatch.engine.engine import Engine
from anybatch.errors import NotYetError
from anybatch.integrations.handed import Handed

__all__ = ["AnyBatch", "BySample", "by_sample"]

TASKS = ("detect", "segment", "pose", "obb")
KEYED = ("cls", "bboxes", "keypoints")
"""Labels with one row for each object."""


class DetectionLoss:
    """Loss of a model of ultralytics, of outputs and labels by sample.

    Args:
        model: the model, with its criterion.
    """

    def __init__(self, model: nn.Module) -> None:
        if getattr(model, "criterion", None) is None:
            model.criterion = model.init_criterion()  # type: ignore[operator]
        self.criterion: Any = model.criterion
        self.items: dict[str, Tensor] = {}

    def __call__(self, outputs: Any, targets: dict[str, Any]) -> Tensor:
        """Return the loss of these samples, and note its parts."""
        index, rows = targets["objects"].collated()
        loss, self.items = self.criterion(outputs, {**targets, **rows, "batch_idx": index})
        total: Tensor = loss.sum()
        return total


def labels_of(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the labels of a batch of ultralytics with one entry, or one row, a sample.

    Args:
        batch: of its loader.

    Raises:
        BatchError: a row belongs to no image.
    """
    images = len(batch["img"])
    rows = {name: batch[name] for name in KEYED if name in batch}
    labels: dict[str, Any] = {"objects": by_sample(batch["batch_idx"], images, **rows)}
    return labels | {name: batch[name] for name in ("masks", "sem_masks") if name in batch}


class AnyBatch:
    """Mixin that makes each batch of an ultralytics trainer one exact step within a budget.

    Write it before the trainer, and pass the class: ``batch`` is then the batch you want, and
    ``nbs`` the same number. Loss, gradients and BatchNorm are those of the undivided batch. The
    images stay on the host, and micro-batches are copied from there.

    Attributes:
        memory: budget of a step on the device, as for `Engine`; set it in the class.
        micro_batch: images in a micro-batch; None (default) chooses.
        engine: the `Engine`, with ``engine.plan`` and ``engine.last``; None before the first step.

    Raises:
        ValueError: at the first step, ``nbs`` is larger than ``batch``.
        NotYetError: at the start, several processes; at the first step, another task than detect,
            segment, pose and obb; a compiled or distilled model; masks that do not overlap; a
            model with a ``loss`` of its own, such as YOLO-World and RT-DETR.

    Example:
        >>> class Trainer(AnyBatch, DetectionTrainer):
        ...     memory = "6GiB"
        >>> YOLO("yolov8n.yaml").train(data="coco8.yaml", batch=64, nbs=64, trainer=Trainer)
    """

    memory: ClassVar[float | str | None] = None
    micro_batch: ClassVar[int | None] = None
    engine: Engine | None = None
    _criterion: DetectionLoss | None = None

    def train(self: Any) -> Any:
        """Train as the next class does, in one process.

        Raises:
            NotYetError: there are several.
        """
        from ultralytics.utils import RANK

        ranks = dist.get_world_size() if dist.is_initialized() else 1
        # Under torchrun each process of a CPU would train on the whole data set, with a loss that
        # ultralytics multiplies by no GPUs (test_several_processes_are_refused_before_they_start).
        if max(ranks, self.world_size) > 1 or RANK != -1:
            raise NotYetError(
                f"AnyBatch trains in one process, on one device, and device={self.args.device!s} "
                "or torchrun has started several: name one device, without torchrun; the batch "
                "fits there within the budget"
            )
        return super().train()  # type: ignore[misc]

    def preprocess_batch(self: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch, prepared on the host, and let the next call of the model train it."""
        self._refuse()
        device, self.device = self.device, torch.device("cpu")
        try:
            batch = super().preprocess_batch(batch)  # type: ignore[misc]
        finally:
            self.device = device
        model = self.model

        def step(called_with: Any, *others: Any, **named: Any) -> Any:
            del model.forward  # for one call: what is saved and copied is the model as it was
            if called_with is not batch:  # something came between, such as an interrupt
                return model(called_with, *others, **named)
            return self._step(batch)

        model.forward = step
        return batch

    def _refuse(self: Any) -> None:
        """Refuse settings of which a step would not be one batch, or that were not tried.

        Raises:
            ValueError: accumulation.
            NotYetError: it names the setting.
        """
        args = self.args
        from ultralytics.nn.tasks import BaseModel

        if type(self.model).loss is not BaseModel.loss or "loss" in vars(self.model):
            # It may read other inputs, or weight its loss (test_a_loss_of_its_own_is_refused).
            raise NotYetError(
                f"a model must compute its loss as ultralytics' BaseModel does, and "
                f"{type(self.model).__name__} has a loss() of its own: use the trainer of "
                "ultralytics, or write the step with anybatch.Engine"
            )
        if self.accumulate > 1 or args.nbs > self.batch_size:
            raise ValueError(
                f"a step must be one batch, and nbs={args.nbs} accumulates batches of "
                f"{self.batch_size}: set batch={args.nbs}, nbs={args.nbs}"
            )
        refused = {
            f"task={args.task}": args.task not in TASKS,
            "compile": bool(args.compile),
            "distill_model": bool(getattr(args, "distill_model", None)),
            "overlap_mask=False": args.task == "segment" and not args.overlap_mask,
        }
        for name, is_set in refused.items():
            if is_set:
                raise NotYetError(
                    f"{name} has not been tried with anybatch: leave it out, or use the trainer of "
                    "ultralytics"
                )

    def _step(self: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the batch, with a backward that adds its gradient, and its parts."""
        if self.engine is None:
            self._criterion = DetectionLoss(self.model)
            self.engine = Engine(
                self.model,
                self._criterion,
                optimizer=self.optimizer,
                memory=self.memory,
                micro_batch=self.micro_batch,
            )
        scaler = self.scaler if self.scaler.is_enabled() else None
        handed = Handed(self.model, [self.optimizer], scaler)
        with handed.aside(drop=False):
            loss = self.engine.backward(batch["img"], labels_of(batch), scaler=scaler)
        return handed.loss(loss), self._criterion.items
