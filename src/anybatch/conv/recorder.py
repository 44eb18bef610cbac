"""Recorder of the convolution kernels that a step calls, and of their layers.

A model need not say which convolutions it has. It is run on tensors without data, in the sizes that
a step will have, and every call is noted: no memory, no time, and the strides are those that the
real ones will have.

    aten::convolution(x [8, 3, 32, 32], w [16, 3, 5, 5]) ──> forward 3x32x32, 8 samples
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.conv.calls import kernels_of
from anybatch.conv.network import Key
from anybatch.conv.problem import Problem
from anybatch.core.tree import tensors

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

ROWS = 2
"""Samples with which a model's kernels are recorded: one may be laid out in another way."""


class KernelRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records the convolution kernels called inside it.

    Args:
        model: its layers are noted by their names, too. Default None.
        samples: of the batch that is run inside. Default 1.

    Attributes:
        keys: kernels and their samples, how often each was called.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module | None = None, samples: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: dict[Key, int] = {}
        self._layers: dict[Problem, dict[str, None]] = {}
        self._model, self._samples, self._now = model, samples, ""
        self._hooks: list[Any] = []

    def scaled(self, samples: int) -> list[Key]:
        """Return the recorded kernels as a batch of another size calls them.

        Args:
            samples: of that batch.
        """
        return [(problem, max(1, n * samples // self._samples)) for problem, n in self.keys]

    def layers(self, problem: Problem) -> list[str]:
        """Return the names of the layers that have a kernel.

        Args:
            problem: the kernel.
        """
        return list(self._layers.get(_layer(problem), ()))

    def __enter__(self) -> KernelRecorder:
        """Begin to record."""
        for name, module in () if self._model is None else self._model.named_modules():
            if isinstance(module, CONVOLUTIONS):
                self._hooks.append(module.register_forward_pre_hook(self._entered(name)))
                self._hooks.append(module.register_forward_hook(self._left, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End the recording."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note a kernel, and run it."""
        for key in kernels_of(func._schema.name, args):
            self.keys[key] = self.keys.get(key, 0) + 1
            if self._now:
                self._layers.setdefault(_layer(key[0]), {})[self._now] = None
        return func(*args, **(kwargs or {}))

    def _entered(self, name: str) -> Any:
        def entered(_module: nn.Module, _args: Any) -> None:
            self._now = name

        return entered

    def _left(self, _module: nn.Module, _args: Any, _result: Any) -> None:
        self._now = ""


def _layer(problem: Problem) -> Problem:
    """Return the common description of all three kernels of a layer."""
    return replace(problem, kernel="forward")


def record_kernels(model: nn.Module, inputs: Tensor) -> KernelRecorder:
    """Record the kernels of a forward and a backward on a few samples; restore all state.

    Args:
        model: in the mode in which it is trained.
        inputs: [N, ...], of which the first two samples are taken, to the model's device.

    Returns:
        The record; its ``scaled`` has the kernels of a larger batch.
    """
    x = inputs[:ROWS].to(next(model.parameters()).device)
    buffers = [buffer.clone() for buffer in model.buffers()]
    gradients = [p.grad for p in model.parameters()]
    with torch.random.fork_rng(), KernelRecorder(model, len(x)) as recorder:
        torch.stack([t.sum() for _, t in tensors(model(x))]).sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return recorder


def sizes_of(size: int, micro_batch: int) -> list[int]:
    """Return the sizes that the micro-batches of a batch have: all but the last, and the last.

    Example:
        >>> sizes_of(100, 32)
        [32, 4]
    """
    n = min(size, micro_batch)
    return [n] if size % n == 0 else [n, size % n]
