"""One walk through a model, for all that a step asks of its modules.

``named_modules`` is a chain of generators as deep as the model; walked four times a step, it costs
more than the rest of the bookkeeping together. The list made here is walked instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Modules = list[tuple[str, nn.Module]]
"""``(path, module)``, each module once, parents before children; the model's own path is ""."""


def walk(model: nn.Module) -> Modules:
    """Return every module of `model` with its path."""
    found: Modules = []
    visited: set[int] = set()
    ahead: Modules = [("", model)]
    while ahead:
        path, module = ahead.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        found.append((path, module))
        prefix = f"{path}." if path else ""
        children = reversed(module._modules.items())
        ahead.extend((prefix + name, child) for name, child in children if child is not None)
    return found


def in_training(module: nn.Module) -> bool:
    """Say whether a module is in training mode; one that was frozen in TorchScript has no mode."""
    return bool(getattr(module, "training", False))


def parameters(modules: Modules) -> list[Tensor]:
    """Return every parameter, tied ones as often as they are tied."""
    return [p for _, module in modules for p in module._parameters.values() if p is not None]


def tensors_of(modules: Iterable[nn.Module], attribute: str) -> list[Tensor]:
    """Return the tensors of modules that are ``"_parameters"`` or ``"_buffers"``."""
    every = [tensor for module in modules for tensor in getattr(module, attribute).values()]
    return [tensor for tensor in every if tensor is not None]


def is_spread(tensor: Any) -> bool:
    """Say whether a tensor is a DTensor; importing that class would take a second."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank: of a DTensor its local part, else all of it."""
    if not is_spread(tensor):
        return tensor
    spread: Any = tensor
    with torch.no_grad():  # else it would be a node of a graph
        part: Tensor = spread.to_local()
    return part


def renormalised(modules: Modules) -> list[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    """Return the embeddings with `max_norm`, in which forward itself writes to the weights.

    torch does so in an undivided step. In a divided one, an earlier micro-batch would read a row
    before the change by a later one.
    """
    return [
        (path, module)
        for path, module in modules
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call `model` with a tensor, the items of a tuple or list, or the keywords of a mapping."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields"):
        return model(*inputs)
    return model(inputs)


def storage_of(tensor: Tensor) -> int:
    """Return the id of a tensor's storage; modes are bypassed, because its address is not used.

    All of it stands on one line: an interrupt at the end of a block, where its first line runs once
    more, would leave torch without function modes.
    """
    # fmt: off
    with torch._C.DisableTorchFunction(): return int(tensor.untyped_storage()._cdata)  # noqa: E701


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled models in eager mode: dispatch modes break compiled code."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
