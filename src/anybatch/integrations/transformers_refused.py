"""Refusals of `transformers.Trainer` features that the engine does not support, before a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from accelerate import Accelerator

from anybatch.errors import NotExactError, NotYetError

PACKAGE = Path(transformers.__file__).parent

WAY_OUT = (
    "mark the part of it in which samples meet with anybatch.coupled, the square of a weight by "
    "coupled(lambda value: 0.1 * value)(weight.square().sum()), or leave the labels out of "
    "the batch and pass compute_loss_func=, which is exact for every loss"
)
"""Remedy for a model's own loss that is not recognised."""


def refuse_arguments(args: Any) -> None:
    """Refuse training arguments that conflict with the engine's decisions, or are untested.

    Raises:
        ValueError: the batch size would be changed silently.
        NotYetError: not possible today.
    """
    if args.auto_find_batch_size:
        raise ValueError(
            "the batch size must not change, and auto_find_batch_size=True reduces it until it "
            'fits: leave it out, and give memory="8GiB" or nothing'
        )
    if str(getattr(args.optim, "value", args.optim)) in ("lomo", "adalomo"):
        raise NotYetError(
            f"an update must come after the gradient of the full batch, and optim={args.optim!s} "
            "updates inside backward: take another optimizer, such as adamw_torch"
        )
    if args.n_gpu > 1:
        raise NotYetError(
            f"one process trains on one device, and this one sees {args.n_gpu} GPUs, which the "
            "Trainer would put in DataParallel: run it under torchrun, or make one visible "
            "(CUDA_VISIBLE_DEVICES=0)"
        )
    for name, what in UNTRIED.items():
        if getattr(args, name, None):
            raise NotYetError(
                f"{what} is not supported by the engine today, and {name}={getattr(args, name)!r}: "
                "leave it out, or use transformers.Trainer"
            )


UNTRIED = {
    "deepspeed": "DeepSpeed",
    "fsdp": "the FSDP that a Trainer wraps a model in",
    "torch_compile": "a compiled model that computes its own loss",
    "use_liger_kernel": "a loss inside a fused kernel",
    "parallelism_config": "tensor, context or sequence parallelism",
}


SKIPPED = {
    "compute_loss": (
        "the loss must be computed outside of the Trainer, to be divided by the denominator of "
        "the full batch",
        "leave it out of the class, and pass compute_loss_func=lambda outputs, labels, "
        "num_items_in_batch=None: ...",
    ),
    "training_step": (
        "a step must reach the engine, which runs the batch",
        "name that class first, class Both({class_name}, Trainer), and let it call super()",
    ),
    "_prepare_context_parallel_inputs": (
        "a batch must stay in one piece until the engine splits it",
        "override _prepare_inputs instead",
    ),
}
"""Methods that transformers calls in a step and this Trainer does not: reason and remedy."""


class Overrides:
    """Methods of a Trainer that are not transformers' own, with the class that has them.

    Args:
        trainer: the object.
        ours: the class whose methods take the place of those of `base`.
        base: `transformers.Trainer`.
        trusted: classes whose `compute_loss` a step calls.
    """

    def __init__(
        self, trainer: Any, ours: type, base: type, trusted: tuple[type, ...] = ()
    ) -> None:
        self._trainer, self._base, self._trusted = trainer, base, trusted
        order = type(trainer).__mro__
        self._before = order[: order.index(ours)]
        self._between = order[order.index(ours) + 1 : order.index(base)]

    @property
    def prepare(self) -> bool:
        """Whether the preparation of a batch before the model is overridden."""
        return any(map(self.anywhere, ("_prepare_inputs", "_prepare_input")))

    @property
    def counts(self) -> bool:
        """Whether how items are counted is overridden."""
        return any(map(self.anywhere, ("get_batch_samples", "_get_num_items_in_batch")))

    def anywhere(self, name: str, trusted: tuple[type, ...] = ()) -> str | None:
        """Return the name of the class or object that overrides an inherited method, or None."""
        if name in vars(self._trainer):
            return "the object"
        before = [class_ for class_ in self._before if class_ not in trusted]
        first = next((class_.__name__ for class_ in before if name in vars(class_)), None)
        return first or self.behind(name)

    def behind(self, name: str) -> str | None:
        """Return the name of an overriding class after this Trainer in the MRO, or None."""
        found = next((class_.__name__ for class_ in self._between if name in vars(class_)), None)
        if found is not None:
            return found
        code = getattr(getattr(self._base, name), "__code__", None)
        own = code is not None and PACKAGE in Path(code.co_filename).parents
        return None if own else "what was put into transformers.Trainer"

    def refuse(self) -> None:
        """Refuse overrides of methods that a step of the engine does not call.

        Raises:
            NotExactError: something is.
        """
        for name, (why, instead) in SKIPPED.items():
            outside = name != "training_step"
            class_name = self.anywhere(name, self._trusted) if outside else self.behind(name)
            if class_name is not None:
                remedy = instead.format(class_name=class_name)
                raise NotExactError(f"{why}, and {class_name} overrides {name}: {remedy}")
        accelerator = getattr(self._trainer, "accelerator", None)
        own = getattr(type(accelerator), "backward", None) is Accelerator.backward
        if accelerator is not None and (not own or "backward" in vars(accelerator)):
            raise NotExactError(
                "a step must reach the engine, which runs backward, and "
                f"{type(accelerator).__name__}.backward is not accelerate's own: override "
                "training_step, and let it call super()"
            )


class Reached(transformers.TrainerCallback):  # type: ignore[misc]
    """Callback that refuses an update if its step did not run in the engine.

    Attributes:
        step: whether the engine has run since the last update.
    """

    def __init__(self, trainer: Any) -> None:
        self.step = False
        self._class_name = type(trainer).__name__

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_named: Any) -> None:
        """Check that the engine has run the step.

        Raises:
            NotExactError: it has not.
        """
        del args, state, control
        if not self.step:
            raise NotExactError(
                f"{SKIPPED['training_step'][0]}, and {self._class_name}.training_step did not: let "
                "it call super().training_step(model, inputs, num_items_in_batch)"
            )
        self.step = False


def refuse_accumulation(trainer: Any) -> None:
    """Refuse a step that is not a batch of its own, however that was set.

    Raises:
        ValueError: an update would be of several batches, or of a part of one.
    """
    state = trainer.accelerator.gradient_state
    found = {
        "args.gradient_accumulation_steps": trainer.args.gradient_accumulation_steps,
        "accelerator.gradient_accumulation_steps": state.num_steps,
        "the number of batches from get_batch_samples": getattr(
            trainer, "current_gradient_accumulation_steps", 1
        ),
    }
    wrong = [f"{name} is {steps}" for name, steps in found.items() if steps != 1]
    if wrong:
        raise ValueError(
            f"a step must be one batch when it begins, and {' and '.join(wrong)}: set "
            "args.gradient_accumulation_steps before train(), which makes one batch of them, and "
            "leave the others at 1"
        )


def refuse_loader(trainer: Any, folded: int, wanted: int) -> None:
    """Refuse a loader that does not give the batches that accumulation was folded into.

    Args:
        trainer: the trainer.
        folded: batches that became one.
        wanted: samples in a batch of the loader.

    Raises:
        ValueError: it has a batch size of its own.
    """
    loader = trainer.callback_handler.train_dataloader
    if folded == 1 or loader is None:
        return
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(sampler, "batch_size", None) or getattr(loader, "batch_size", None)
    if size != wanted:
        raise ValueError(
            f"gradient_accumulation_steps={folded} is one batch of {wanted} "
            f"samples, and those of the train dataloader have {size or 'no size that it tells'}: "
            "give it this batch size, and leave gradient_accumulation_steps out"
        )


def refuse_count(trainer: Any, base: Any, inputs: Any, passed: Any) -> None:
    """Refuse items that were counted in another way, by which a model's loss would be divided.

    Raises:
        NotExactError: they are not those of the labels.
    """
    own = base._get_num_items_in_batch(trainer, [inputs], trainer.args.device)
    there, here = (None if count is None else float(count) for count in (own, passed))
    if there != here:
        class_name = trainer._overrides.anywhere("_get_num_items_in_batch")
        class_name = class_name or trainer._overrides.anywhere("get_batch_samples")
        raise NotExactError(
            "the loss of a model must be divided by the number of its labels, and "
            f"num_items_in_batch is {_number(here)} in {class_name} and {_number(there)} in "
            "transformers.Trainer: do not change it, or divide by it in compute_loss_func="
        )


def _number(count: float | None) -> str:
    return "none" if count is None else f"{count:g}"
