"""Arithmetic on a few numbers past all modes, which would cost most of its time.

A dispatch mode intercepts every kernel, at ten times the cost of one that adds up the channels of a
layer. Tensors computed here must be plain and resident.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor
from torch.nn import Parameter

PLAIN = (Tensor, Parameter)


class Unseen:
    """Compute in the body past all modes; with subclasses of tensors as ever.

    Args:
        tensors: that are computed with. The body makes none that needs a gradient.
    """

    __slots__ = ("_dispatch", "_function")

    def __init__(self, *tensors: Tensor) -> None:
        plain = all(type(tensor) in PLAIN for tensor in tensors)
        self._dispatch = torch._C._DisableTorchDispatch() if plain else None
        self._function = torch._C.DisableTorchFunction() if plain else None

    def __enter__(self) -> None:
        if self._dispatch is not None and self._function is not None:
            self._dispatch.__enter__()  # type: ignore[no-untyped-call]
            self._function.__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._dispatch is not None and self._function is not None:
            self._function.__exit__(exc_type, error, trace)
            self._dispatch.__exit__(exc_type, error, trace)
