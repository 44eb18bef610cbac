"""What a `transformers.Trainer` can do and this one must not: refused by name, before it trains."""

from __future__ import annotations

from typing import Any

from anybatch.errors import NotExactError, NotYetError

WAY_OUT = (
    "mark the part of it in which samples meet with anybatch.coupled, or leave the labels out of "
    "the batch and pass compute_loss_func=, which is exact for every loss"
)
"""What helps where a model's own loss is not known."""


def refuse_arguments(args: Any) -> None:
    """Refuse training arguments that decide what the engine decides, or that nobody has tried.

    Raises:
        ValueError: the batch size would be changed behind the person's back.
        NotYetError: not possible today.
    """
    if args.auto_find_batch_size:
        raise ValueError(
            "a batch must stay what it is, and auto_find_batch_size=True makes it smaller until it "
            'fits: leave it out, and give memory="8GiB" or nothing'
        )
    if args.n_gpu > 1:
        raise NotYetError(
            f"one process trains on one device, and this one sees {args.n_gpu} GPUs, which the "
            "Trainer would put in DataParallel: run it under torchrun, or show it one "
            "(CUDA_VISIBLE_DEVICES=0)"
        )
    for name, what in UNTRIED.items():
        if getattr(args, name, None):
            raise NotYetError(
                f"{what} is not something that the engine can run today, and {name}="
                f"{getattr(args, name)!r}: leave it out, or use transformers.Trainer"
            )


UNTRIED = {
    "deepspeed": "DeepSpeed",
    "fsdp": "the FSDP that a Trainer wraps a model in",
    "torch_compile": "a compiled model that computes its own loss",
    "use_liger_kernel": "a loss inside a fused kernel",
    "parallelism_config": "tensor, context or sequence parallelism",
}


def refuse_overridden(trainer: Any, base: Any) -> None:
    """Refuse a subclass that computes its loss in a method that is not called any more.

    Raises:
        NotExactError: it does.
    """
    if type(trainer).compute_loss is not base.compute_loss:
        raise NotExactError(
            "the loss must be known apart from the Trainer, to be divided by what the whole batch "
            f"has, and {type(trainer).__name__} overrides compute_loss: pass compute_loss_func="
            "lambda outputs, labels, num_items_in_batch=None: ... instead"
        )
