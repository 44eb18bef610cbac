"""Refusals of draws that a micro-batch cannot make for the full batch, with a way out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anybatch.core.accelerators import random_states
from anybatch.core.modules import in_training
from anybatch.errors import NotExactError
from anybatch.execution.full_batch_rng.kernels import STATEFUL, Draw

WAY_OUT = 'Use rng="micro_batch", or give micro_batch >= the batch size'


def state_now() -> Any:
    """Return a value that differs between states of torch's generators."""
    cpu = hash(torch.get_rng_state().numpy().tobytes())
    others = random_states()
    return (cpu, *(state.numpy().tobytes() for _, state in others)) if others else cpu


def unmoved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a kernel that may draw inside, and refuse it if it draws.

    Raises:
        NotExactError: it did, or would from an RNG of its own.
    """
    _refuse_stateful(func, args, kwargs)
    with torch._C.DisableTorchFunction():
        before = state_now()
        result = func(*args, **kwargs)
        moved = state_now() != before
    if moved:
        raise NotExactError(
            f"random draws must be intercepted to be made for the full batch, and {func} draws "
            "inside its kernel: use a function that calls a kernel of torch for the draw, without "
            f"out=, or torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for attention. {WAY_OUT}"
        )
    return result


def _refuse_stateful(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name not in STATEFUL:
        return
    arguments = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    if arguments.get(STATEFUL[schema.name]) and arguments.get("train"):
        raise NotExactError(
            f"random draws must come from torch's generators, and {schema.name} has its own for "
            f"the dropout between layers: put nn.Dropout between single layers. {WAY_OUT}"
        )


def refuse_generator(draw: Draw) -> None:
    """Refuse a draw from a generator that is not the global one.

    Raises:
        NotExactError: naming the draw.
    """
    if draw.generator:
        raise NotExactError(
            f"random draws must come from the global generators, and {draw.name} has one of its "
            "own (generator=), which every micro-batch would advance: leave generator= out. "
            f"{WAY_OUT}"
        )


def drawn_late(draw: Draw) -> NotExactError:
    """Return the error for a draw in backward that is none of forward."""
    return NotExactError(
        f"draws in backward must repeat those of forward, and {draw.name} draws anew (a hook on a "
        "gradient, or checkpoint with preserve_rng_state=False): every micro-batch would draw for "
        f"itself. {WAY_OUT}"
    )


def refuse_scripted(model: nn.Module) -> None:
    """Refuse a scripted part in training mode: its interpreter does not let a mode intercept draws.

    Raises:
        NotExactError: there is one.
    """
    if any(isinstance(m, torch.jit.ScriptModule) and in_training(m) for m in model.modules()):
        raise NotExactError(
            "random draws must be intercepted to be made for the full batch, and a part of the "
            "model is a torch.jit.ScriptModule in training mode: use the module it was made of. "
            f"{WAY_OUT}"
        )
