"""Detection of writes to tensors by memory: ``.data`` has another count of writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Writes(TorchDispatchMode):
    """Dispatch mode that records which of some tensors kernels write to.

    Args:
        tensors: those that matter.
        keep: copy the values of one before it is written to. Default False.
    """

    def __init__(self, tensors: Iterable[Tensor], *, keep: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = {_memory(tensor): tensor for tensor in tensors if _has_memory(tensor)}
        self._written: set[int] = set()
        self._keep = keep
        self._saved: list[tuple[Tensor, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._written)

    def wrote(self, tensor: Tensor) -> bool:
        """Say whether a kernel wrote to the memory of a tensor."""
        return _has_memory(tensor) and _memory(tensor) in self._written

    def put_back(self) -> None:
        """Restore the copied values of the tensors."""
        with torch.no_grad():
            for data, values in self._saved:
                data.copy_(values)

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, and record the tensors that it writes to."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            pairs = zip(func._schema.arguments, args, strict=False)
            named = ((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs)
            for argument, value in (*pairs, *named):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._detect(value if isinstance(value, list | tuple) else (value,))
        run: Callable[..., Any] = func
        return run(*args, **kwargs)

    def _detect(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and _has_memory(value) and _memory(value) in self._watched:
                self._note(_memory(value))

    def _note(self, memory: int) -> None:
        if self._keep and memory not in self._written:
            data = self._watched[memory].detach()
            self._saved.append((data, data.to("cpu", copy=True)))  # no room of the step's is taken
        self._written.add(memory)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided


def _memory(tensor: Tensor) -> int:
    """Return the id of a tensor's storage, which tensors on the same memory share."""
    return int(tensor.untyped_storage()._cdata)
