"""Shows every kernel of a lane to the pager, before and after it runs.

A dispatch mode intercepts each of them, in forward and in backward. That costs as much as a small
kernel, so there is no such mode where nothing will be evicted (`anybatch.lockstep.lockstep`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.memory.meter import tensors_in
from anybatch.memory.pager import key_of

PLAIN = frozenset({Tensor, Parameter})
OTHERS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})
"""Types that hold no tensor; tested first, because every kernel has some."""


class KernelObserver(Protocol):
    """Protocol of an observer of every kernel: a pager, or a recorder of calls to one."""

    limit: int | None

    def before(self, keys: Iterable[int]) -> None:
        """Evict storages until a kernel's operands fit, where there is a limit."""

    def use(self, key: int, writes: bool) -> None:  # noqa: FBT001
        """Make a storage's memory be here, before a kernel runs on it, or writes to it."""

    def take(self, key: int, tensor: Tensor) -> None:
        """Take in the storage of a tensor that a kernel has made."""

    def keep(self, key: int) -> None:
        """Bring a storage's memory back for good."""

    def give_up(self, key: int) -> None:
        """Make a storage resident, and stop tracking it: another owner moves it from now on."""


class Paging(TorchDispatchMode):
    """Dispatch mode that makes operands of kernels resident, and registers their results.

    Args:
        pager: the pager that does it.
    """

    supports_higher_order_operators = True

    def __init__(self, pager: KernelObserver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pager = pager
        self._writes: dict[Any, bool] = {}

    def give_up(self, key: int) -> None:
        """Hand over a storage to another owner, which moves it from now on."""
        self._pager.give_up(key)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False to omit the guard against compilation; compiled models are refused."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make a kernel's operands resident, run it, and register its results."""
        writes = self._writes.get(func)
        if writes is None:
            schema = getattr(func, "_schema", None)
            writes = self._writes[func] = schema is None or schema.is_mutable
        with torch._C.DisableTorchFunction():
            operands: list[int | None] = []
            if self._pager.limit is not None:
                self._pager.before(_keys((args, kwargs)))
            self._bring(args, operands, writes)
            if kwargs:
                self._bring(kwargs.values(), operands, writes)
                result = func(*args, **kwargs)
            else:
                result = func(*args)
            self._take(result, operands)
        return result

    def _bring(self, values: Any, operands: list[int | None], writes: bool) -> None:  # noqa: FBT001
        for value in values:
            type_ = type(value)
            if type_ in OTHERS:
                continue
            if type_ in PLAIN or isinstance(value, Tensor):
                if value.layout is torch.strided and (type_ in PLAIN or not _wraps(value)):
                    key = key_of(value)
                    operands.append(key)
                    if key is not None:
                        self._pager.use(key, writes)
                else:
                    keep(self._pager, value)
            elif isinstance(value, list | tuple):
                self._bring(value, operands, writes)
            elif isinstance(value, dict):
                self._bring(value.values(), operands, writes)

    def _take(self, value: Any, operands: list[int | None]) -> None:
        type_ = type(value)
        if type_ in PLAIN or isinstance(value, Tensor):
            if value.layout is torch.strided and (type_ in PLAIN or not _wraps(value)):
                key = key_of(value)
                if key is not None and key not in operands:
                    self._pager.take(key, value)
            else:
                keep(self._pager, value)
        elif isinstance(value, list | tuple):
            for item in value:
                self._take(item, operands)
        elif isinstance(value, dict):
            self._take(list(value.values()), operands)


def keep(pager: KernelObserver, tensor: Tensor) -> None:
    """Make a tensor resident for good: other code has its address."""
    for inner in _inside(tensor):
        key = key_of(inner)
        if key is not None:
            pager.keep(key)


def _keys(values: Any) -> Iterator[int]:
    """Yield the addresses of the storages that a kernel needs."""
    for tensor in tensors_in(values):
        for inner in _inside(tensor):
            key = key_of(inner)
            if key is not None:
                yield key


def _wraps(tensor: Tensor) -> bool:
    return type(tensor) not in PLAIN and hasattr(tensor, "__tensor_flatten__")


def _inside(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the strided tensors that a tensor is made of."""
    if _wraps(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            yield from _inside(getattr(tensor, name))
    elif tensor.layout == torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor
