"""`Trainer`: a `transformers.Trainer` for any mini-batch within a budget, with its exact gradient.

A Trainer makes a large batch of small ones: ``per_device_train_batch_size``, tried until it fits,
times ``gradient_accumulation_steps``. Whether their sum is the gradient of the batch depends on the
model: only one that takes ``num_items_in_batch`` divides by the tokens of all of them. Here the
product of both numbers is one batch while it trains, and each step hands it to one
`Engine.backward`:

    loader          per_device_train_batch_size * gradient_accumulation_steps samples
    training_step   micro-batches that fit `memory`, divided by what the full batch has
    all else        the Trainer's own: clipping, scheduler, callbacks, checkpoints, evaluation

The loss is that of the undivided batch: the one that the model returns for all samples in one
forward. Source: transformers 5.23, ``Trainer.training_step`` and ``Trainer.compute_loss``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.core.plan import Plan
from anybatch.core.units import show_bytes
from anybatch.engine.engine import BatchNormMode, Engine, RngMode
from anybatch.integrations.install import require
from anybatch.integrations.transformers_losses import Items, UserLoss, evenly_over_all, smoothed
from anybatch.integrations.transformers_padding import (
    Evaluation,
    OfTrimmed,
    Outcome,
    Trimmed,
    may_divide,
)
from anybatch.lockstep.sync_batchnorm import Adaptive
from anybatch.planner.planner import RUNGS

require("transformers", "transformers", "accelerate")

import transformers  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL,
)
from transformers.utils import logging  # noqa: E402

from anybatch.integrations.transformers_refused import (  # noqa: E402
    WAY_OUT,
    Overrides,
    Reached,
    refuse_accumulation,
    refuse_arguments,
    refuse_count,
    refuse_loader,
)

logger = logging.get_logger("transformers.trainer.anybatch")


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` with batches that fit in `memory`, and the exact gradient of each.

    Write ``memory="8GiB"`` instead of guessing ``per_device_train_batch_size`` and
    ``gradient_accumulation_steps``. Their product is the batch of a rank, from one call of the
    collator; while `train` runs, the first is the product and the second is 1 in `args`. So a
    step is one batch of the loader: steps, epochs, logs, checkpoints and callbacks count as before,
    and ``on_substep_end`` is never called. Changes between two calls of `train` count, as they do
    there; changes that would accumulate in the middle of one are refused at the step. With
    ``dataloader_drop_last`` the last batch of an epoch is skipped if it is not full. The batch is
    padded to its longest row by the collator, and so is each micro-batch; ``cut_padding=True`` cuts
    the columns that a micro-batch does not need (`transformers_padding`).

    The loss of the model is traced (`anybatch.loss.traced_model`): a weighted sum of torch's own
    losses needs no declaration, and ``num_items_in_batch`` is not needed.
    ``label_smoothing_factor`` and ``compute_loss_func`` work as they do there; a function that
    couples the samples is computed once on the outputs of all. Evaluation is the Trainer's own, in
    parts that fit where `memory`, `micro_batch` or `plan` is given, one process evaluates and the
    loss is the model's.

    All overrides of a subclass are called as there, in any order of classes, except those that the
    engine replaces: these are refused with the name of the class.

    Args:
        model: as for `transformers.Trainer`, and so are `args`, `others` and `named`.
        args: the training arguments.
        others: its positional arguments.
        memory: budget of a step on the device, as for `Engine`.
        micro_batch: samples in a micro-batch; None (default) chooses.
        batchnorm: as for `Engine`.
        rng: as for `Engine`; "batch" draws dropout as the undivided batch would.
        plan: obey it; a checkpoint brings its own.
        rungs: as for `Engine`.
        cut_padding: cut the columns that are padding in all rows of a micro-batch, and sort rows by
            length. It is less to compute, and the plan says "not shown": the gradient is that of
            the batch if the model uses its attention mask. Default False.
        named: its keyword arguments.

    Attributes:
        engine: the `Engine`, with ``engine.plan`` and ``engine.last``; None before the first step.

    Raises:
        ImportError: transformers or accelerate is not installed.
        ValueError: ``auto_find_batch_size``, which changes the batch; gradients would be
            accumulated over several batches of the loader; `cut_padding` with ``rng="batch"``.
        NotYetError: DeepSpeed, FSDP, DataParallel, a compiled model, fused losses.
        NotExactError: `compute_loss`, or another method that is not called, is overridden.
        LossError: at the first step, if the loss of the model is not recognised.

    Example:
        >>> trainer = Trainer(model, args, train_dataset=data, memory="8GiB")
        >>> trainer.train()
    """

    _train_batch_size: int
    _trusted: tuple[type, ...] = ()
    """Classes whose own loss a step computes: theirs is no override."""

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        *others: Any,
        memory: float | str | None = None,
        micro_batch: int | None = None,
        batchnorm: BatchNormMode | Adaptive = "exact",
        rng: RngMode = "micro_batch",
        plan: Plan | None = None,
        rungs: Collection[str] = RUNGS,
        cut_padding: bool = False,
        **named: Any,
    ) -> None:
        if cut_padding and rng == "batch":
            raise ValueError(
                'with rng="batch" dropout is drawn for all columns of the undivided batch, and '
                "cut_padding=True computes fewer: leave one of them out"
            )
        arguments = transformers.TrainingArguments("tmp_trainer") if args is None else args
        refuse_arguments(arguments)
        self._overrides = Overrides(self, Trainer, transformers.Trainer, self._trusted)
        self._overrides.refuse()
        self.engine: Engine | None = None
        self._requested: dict[str, Any] = {
            "memory": memory,
            "micro_batch": micro_batch,
            "plan": plan,
        }
        self._how: dict[str, Any] = {"batchnorm": batchnorm, "rng": rng, "rungs": rungs}
        self._cuts = cut_padding
        self._traced: Trimmed | None = None
        self._user_loss: UserLoss | None = None
        self._made_for: tuple[int, ...] = ()
        self._folded = 1
        self._logged_plan: Plan | None = None
        self._history = History()
        self._evaluates: Evaluation | None = None
        super().__init__(model, arguments, *others, **named)
        self._reached = Reached(self)
        self.callback_handler.add_callback(self._reached)

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
        """Run the loop, in which a step is one batch of the loader."""
        refuse_arguments(self.args)
        with self._one_batch_a_step():
            return super()._inner_training_loop(*arguments, **named)

    @contextmanager
    def _one_batch_a_step(self) -> Iterator[None]:
        """Fold accumulation into the batch in the body; restore settings that it did not set."""
        args, times = self.args, self.args.gradient_accumulation_steps
        before = args.per_device_train_batch_size, self._train_batch_size
        folded = before[0] * times, before[1] * times
        args.per_device_train_batch_size, self._train_batch_size = folded
        args.gradient_accumulation_steps, self._folded = 1, times
        try:
            yield
        finally:
            self._folded = 1
            if args.gradient_accumulation_steps == 1:
                args.gradient_accumulation_steps = times
            if args.per_device_train_batch_size == folded[0]:
                args.per_device_train_batch_size = before[0]
            if self._train_batch_size == folded[1]:
                self._train_batch_size = before[1]

    def get_train_dataloader(self) -> Any:
        """Return the loader, with batches on the host; micro-batches are copied from there."""
        if self._overrides.prepare:  # which would find them on the device
            return super().get_train_dataloader()
        accelerator = self.accelerator
        placed, accelerator.device_placement = accelerator.device_placement, False
        try:
            return super().get_train_dataloader()
        finally:
            accelerator.device_placement = placed

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Add the gradient of the full batch, over all ranks, and return its loss."""
        self._reached.step = True
        self._overrides.refuse()
        refuse_accumulation(self)
        refuse_loader(self, self._folded, self._loaded_at_once)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        inputs = self._prepare_inputs(inputs) if self._overrides.prepare else inputs
        engine = self._engine_for(inner)
        if self._traced is not None and self._overrides.counts and self.model_accepts_loss_kwargs:
            refuse_count(self, transformers.Trainer, inputs, num_items_in_batch)
        rows, labels = self._split(dict(inputs))
        if self._user_loss is not None:
            self._user_loss.items = self._items(num_items_in_batch)
        scaler = getattr(self.accelerator, "scaler", None)
        with self._around(inner), self.compute_loss_context_manager():
            self._history.replay(engine)
            if self._traced is not None:
                self._traced.training = inner.training
                rows = self._traced.ordered(rows)
            decided = engine._decisions
            loss = self._backward(engine, rows, labels, scaler)
            if engine._decisions > decided or self._history.plan is None:
                self._history.note(engine, rows, labels)
        self._tell(engine)
        return loss

    @property
    def _loaded_at_once(self) -> int:
        """Samples in a batch of the loader."""
        return self._train_batch_size

    def _backward(self, engine: Engine, rows: Any, labels: Any, scaler: Any) -> Tensor:
        """Add the gradient of a batch that `_split` has returned, and return its loss."""
        return engine.backward(rows, labels, scaler=scaler)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,  # noqa: FBT001 it is the Trainer's own method
        ignore_keys: list[str] | None = None,
    ) -> Outcome:
        """Return loss, outputs and labels of a batch, in parts that fit where a budget is named.

        A class that evaluates in its own way, such as one that generates, does so.
        """
        step, overrides = super().prediction_step, self._overrides
        plain = overrides.behind("prediction_step") is None and not overrides.counts
        requested = any(value is not None for value in self._requested.values())
        if plain and requested and may_divide(self, model, inputs):
            overrides.refuse()
            rows = self._prepare_inputs(inputs) if overrides.prepare else inputs
            with self._around(model), self.compute_loss_context_manager():
                found = self._evaluation_of(model).step(
                    self, dict(rows), ignore_keys, loss_only=prediction_loss_only
                )
            if found is not None:
                return found
        own: Outcome = step(model, inputs, prediction_loss_only, ignore_keys)
        return own

    @contextmanager
    def _around(self, model: nn.Module) -> Iterator[None]:
        """Run the body as the Trainer runs a model, with experts balanced over the full batch."""
        with plain_forward(model), evenly_over_all(model), self.accelerator.autocast():
            yield

    def _evaluation_of(self, model: nn.Module) -> Evaluation:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        found = self._evaluates
        if found is None or found.model is not model or found.optimizer is not optimizer:
            found = self._evaluates = Evaluation(model, optimizer, self._requested)
        return found

    def _split(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return the model's inputs, and the labels for a loss outside of the model, or None."""
        if self._traced is not None:
            return inputs, None
        labels = inputs.pop("labels", None)
        return inputs, labels

    def _items(self, here: Tensor | int | None) -> Items | None:
        """Return the items of the batch over all ranks."""
        if here is None:
            return None
        if self.args.world_size > 1 and not self.args.average_tokens_across_devices:
            device = self.args.device
            here = self.accelerator.gather(torch.as_tensor(here, device=device)).sum()
        return Items(here)

    def _engine_for(self, model: nn.Module) -> Engine:
        """Return the engine of a model and its optimizer."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        losses = self.compute_loss_func, self.label_smoother
        made_for = (id(model), id(optimizer), *map(id, losses))
        if self.engine is None or self._made_for != made_for:
            self._traced = self._user_loss = None
            subject, loss = self._loss_of(model)
            requested = self._history.options() or self._requested
            if requested.get("plan") is not None:
                requested = {"plan": requested["plan"]}
            self.engine = Engine(subject, loss, optimizer=optimizer, **requested, **self._how)
            self._made_for = made_for
        return self.engine

    def _loss_of(self, model: nn.Module) -> tuple[nn.Module, Any]:
        """Return the module that the engine trains, and its loss."""
        if self.compute_loss_func is not None:
            self._user_loss = UserLoss(self.compute_loss_func)
            return model, self._user_loss
        if self.label_smoother is not None:
            inner = getattr(getattr(model, "base_model", None), "model", model)
            name = type(inner if hasattr(model, "peft_config") else model).__name__
            return model, smoothed(self.label_smoother, shifts=name in CAUSAL.values())
        self._traced = Trimmed(model, cuts=self._cuts)
        return self._traced, OfTrimmed(self._traced, WAY_OUT)

    def _tell(self, engine: Engine) -> None:
        """Log a new plan, and the bytes of a micro-batch's logits."""
        plan = engine.plan
        if plan is None or plan == self._logged_plan:
            return
        self._logged_plan = plan
        logger.info(str(plan))
        if self._traced is not None and self._traced.logits and engine.last is not None:
            logger.info(about_logits(self._traced.logits, plan))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            self._history.save(output_dir, self.engine)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._requested["plan"] is None:
            self._history.load(checkpoint)


@contextmanager
def plain_forward(model: nn.Module) -> Iterator[None]:
    """Remove accelerate's mixed precision from a model in the body; the caller enters autocast.

    accelerate's wrapper of forward cannot be copied, and so has no dry run without data.
    """
    own = vars(model).get("_original_forward")
    wrapped = vars(model).pop("forward", None) if own is not None else None
    try:
        if wrapped is not None and getattr(own, "__func__", None) is not type(model).forward:
            vars(model)["forward"] = own  # somebody else's
        yield
    finally:
        if wrapped is not None:
            vars(model)["forward"] = wrapped


def about_logits(size: int, plan: Plan) -> str:
    """Return a log message about the logits of a micro-batch, of `size` bytes."""
    text = f"the logits of a micro-batch take {show_bytes(size)}"
    if plan.memory is None:
        return text
    share = size / max(plan.memory.predicted, 1)
    return (
        f"{text} each time they are held, {share:.0%} of the {show_bytes(plan.memory.predicted)} "
        "of the forecast of a step; a smaller micro_batch= or shorter samples reduce them"
    )


# Plans of a run in its checkpoint, so that a resumed run splits each batch as before.
#
# The first steps of a run find the fastest size by a clock, and batches with longer samples are
# planned only from shapes, from earlier forecasts. So a checkpoint stores the first plan with the
# fastest size so far, and the shapes of the batches at which a plan was made, in order. A resumed
# run plans them again, on rows of zeros, before its first step, with that size. Then it splits
# every batch like an unbroken run; one resumed from within the first ten steps searches no further.
#
#     planned:  8 x 11, searched ── 8 x 14 ── 8 x 16     checkpoint    resumed: again, again, again

NAME = "anybatch_plan.json"
Shape = tuple[list[int], str]
Shapes = tuple[dict[str, Shape], Shape | dict[str, Shape] | None]
"""Shape and dtype of a model's keyword arguments, and of separate labels, if any."""


class History:
    """The plans of a run.

    Attributes:
        plan: the first one; None before it.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self._planned: list[Shapes] = []
        self._again: list[Shapes] = []

    def note(self, engine: Engine, inputs: Mapping[str, Any], labels: Any) -> None:
        """Take in a step in which something was planned; rows of anything but tensors are left."""
        self.plan = self.plan or engine.plan
        if all(isinstance(value, Tensor) for value in inputs.values()):
            self._planned.append((_shapes(inputs), _shapes(labels)))

    def options(self) -> dict[str, Any]:
        """Return options for an engine that continues as before: a budget, a size or a plan."""
        plan = self.plan
        if plan is None:
            return {}
        if plan.memory is None:
            return {"micro_batch": plan.micro_batch}
        return {"memory": plan.memory.budget} if self._again else {"plan": plan}

    def replay(self, engine: Engine) -> None:
        """Plan again the batches that were planned before the checkpoint."""
        again, self._again = self._again, []
        for place, (inputs, labels) in enumerate(again):
            rows, targets = _zeros(inputs), _zeros(labels)
            if place == 0 and self.plan is not None:
                engine._recall(self.plan.micro_batch, rows, targets)
            else:
                engine.foresee(rows, targets, timed=False)

    def save(self, folder: str, engine: Engine | None) -> None:
        """Write it to a checkpoint's folder, with the fastest way that an engine has found."""
        plan = self.plan
        if plan is not None and engine is not None and engine.plan is not None:
            fastest = replace(plan, micro_batch=engine._fastest or plan.micro_batch)
            plan = engine.plan if engine.plan.offload is not None else fastest
        if plan is not None:
            found = {"plan": json.loads(plan.to_json()), "planned": self._planned}
            Path(folder, NAME).write_text(json.dumps(found, indent=1))

    def load(self, folder: str) -> None:
        """Read it from there, if it is there."""
        path = Path(folder, NAME)
        if path.exists():
            found = json.loads(path.read_text())
            self.plan = Plan.from_json(json.dumps(found["plan"]))
            self._planned = found["planned"]
            simple = self.plan.memory is not None and self.plan.offload is None
            self._again = list(self._planned) if simple else []


def _shapes(labels: Any) -> Any:
    """Return the shapes of tensors, by name where they have names; None without any."""
    if isinstance(labels, Mapping):
        return {name: _shapes(value) for name, value in labels.items()}
    if not isinstance(labels, Tensor):
        return None
    return list(labels.shape), str(labels.dtype).removeprefix("torch.")


def _zeros(shapes: Any) -> Any:
    if isinstance(shapes, Mapping):
        return {name: _zeros(shape) for name, shape in shapes.items()}
    return None if shapes is None else torch.zeros(shapes[0], dtype=getattr(torch, shapes[1]))
