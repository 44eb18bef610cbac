"""Paged model: dispatch mode that brings in parameters and gradients before every kernel.

Hooks on modules would miss a weight that another module uses (attention uses its projection's),
tied weights, `functional_call` and recomputations in backward. A dispatch mode intercepts every
kernel of its thread, forward, backward and in an optimizer; a function mode intercepts reads of a
tensor's address. Both are active only while the context is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from anybatch.core import optimizers
from anybatch.core.functions import keywords
from anybatch.core.hooks import service
from anybatch.core.norm.intercept import ESCAPES
from anybatch.memory.hold import Hold
from anybatch.memory.meter import Meter
from anybatch.memory.pager import key_of
from anybatch.memory.paging import OTHERS, PLAIN, Paging
from anybatch.memory.stores import Store
from anybatch.offload.states.pages import Pages

DETACH = torch.ops.aten.detach.default
"""The one kernel that reads no memory."""

PARAMETER, GRADIENT = range(2)
"""The roles of pages."""


class PagedModel:
    """The parameters of a model and their gradients, in a bounded memory.

    Args:
        model: whose.
        limit: bytes of them that may be in memory at a time.
        make: returns the store where the others go.
        meters: count the resident bytes. Default none.

    Attributes:
        pages: which are here.
    """

    def __init__(
        self, model: nn.Module, limit: int, make: Callable[[], Store], meters: Sequence[Meter] = ()
    ) -> None:
        self._model, self._limit, self._make, self._meters = model, limit, make, meters
        self._stack = ExitStack()
        self._removers: dict[int, Callable[[], None]] = {}

    def enter(self) -> None:
        """Begin to see kernels, of this thread."""
        hold = Hold(self._make(), next(self._model.parameters()).device, self._meters)
        self.pages = Pages(hold, self._limit, optimizers.SMALL)
        with ExitStack() as stack:
            stack.callback(hold.close)
            self.register_new()
            stack.callback(self._unhook)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(_Addresses(self.pages))
            stack.enter_context(_PageInMode(self.pages))
            self._stack = stack.pop_all()

    def exit(self) -> None:
        """Bring everything back, and see nothing more."""
        self._stack.close()

    def register_new(self) -> None:
        """Take in parameters and gradients that are new."""
        with torch._C.DisableTorchFunction():
            for number, parameter in enumerate(self._model.parameters()):
                if not _plain(parameter):
                    continue
                self._take(parameter, PARAMETER, number)
                if parameter.requires_grad and id(parameter) not in self._removers:
                    self._hook(parameter, number)
                if parameter.grad is not None:
                    self._take(parameter.grad, GRADIENT, number)

    def _take(self, tensor: Tensor, role: int, number: int) -> None:
        key = key_of(tensor) if _plain(tensor) else None
        if key is not None:
            for mode in _get_current_dispatch_mode_stack():
                if isinstance(mode, Paging):  # a lane has made this gradient
                    mode.give_up(key)
            self.pages.add(key, tensor.untyped_storage(), role, number)

    def _hook(self, parameter: Tensor, number: int) -> None:
        @service
        def accumulated(leaf: Tensor) -> None:
            with torch._C.DisableTorchFunction():
                if leaf.grad is not None:
                    self._take(leaf.grad, GRADIENT, number)

        handle = parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
        self._removers[id(parameter)] = handle.remove

    def _unhook(self) -> None:
        while self._removers:
            self._removers.popitem()[1]()


class _PageInMode(TorchDispatchMode):
    """Has the operands of every kernel brought in before it runs.

    Args:
        pages: the pages that do it.

    Attributes:
        pages: the same; read by forecasts (`anybatch.memory.paged`).
    """

    supports_higher_order_operators = True

    def __init__(self, pages: Pages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pages = pages
        self._writes: dict[Any, _Writes] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Disable the guard against compilation: compiled code runs eagerly here."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Bring in the storages of a kernel, and run it; torch refuses views of no memory."""
        kwargs = kwargs or {}
        if func not in self._writes:
            self._writes[func] = _Writes(func)
        with torch._C.DisableTorchFunction():
            accesses = [] if func is DETACH else list(self._writes[func].of(args, kwargs))
            if not accesses:
                return func(*args, **kwargs)
            halves = [] if self.pages.fit(accesses) else _halves(func, args, kwargs)
            if not halves:
                self.pages.use(accesses, str(func))
                return func(*args, **kwargs)
        found = [self.__torch_dispatch__(func, types, *half) for half in halves]
        return None if found[0] is None else [*found[0], *found[1]]


def _halves(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the two calls that a kernel for many tensors is; none for any other kernel.

    Each of its results is of one tensor of every list, as in `clip_grad_norm_`.
    """
    count = len(args[0]) if args and isinstance(args[0], list | tuple) else 0
    if count < 2 or not str(func).startswith("aten._foreach_"):
        return []

    def part(value: Any, which: slice) -> Any:
        return value[which] if isinstance(value, list | tuple) and len(value) == count else value

    return [
        (tuple(part(v, half) for v in args), {k: part(v, half) for k, v in kwargs.items()})
        for half in (slice(0, count // 2), slice(count // 2, count))
    ]


class _Writes:
    """Arguments that a kernel writes to; all of them if it has no schema.

    Args:
        func: the kernel.
    """

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        self._all = schema is None
        arguments = [] if schema is None else schema.arguments
        found = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        self._places = found
        self._names = {a.name for a, writes in zip(arguments, found, strict=True) if writes}

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int, bool]]:
        """Yield the keys of the storages in a call, and whether they are written to."""
        for place, value in enumerate(args):
            yield from _keys(value, self._all or self._places[place])
        for name, value in kwargs.items():
            yield from _keys(value, self._all or name in self._names)


class _Addresses(TorchFunctionMode):
    """Function mode that makes a tensor permanently resident when its address is requested.

    Args:
        pages: the pages that prefetch it.
    """

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make tensors permanently resident for a function that requests their address."""
        if func in ESCAPES:
            with torch._C.DisableTorchFunction():
                for key, _ in _keys(args, writes=True):
                    self._pages.keep(key)
        return func(*args, **keywords(func, kwargs))


def _keys(value: Any, writes: bool) -> Iterator[tuple[int, bool]]:  # noqa: FBT001
    type_ = type(value)
    if type_ in OTHERS:
        return
    if type_ in PLAIN or isinstance(value, Tensor):
        key = key_of(value) if _plain(value) else None
        if key is not None:
            yield key, writes
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _keys(item, writes)
    elif isinstance(value, dict):
        yield from _keys(list(value.values()), writes)


def _plain(tensor: Tensor) -> bool:
    """Return whether a tensor is plain: strided, materialised, and with a single storage."""
    if is_lazy(tensor) or tensor.layout is not torch.strided:
        return False
    return type(tensor) in PLAIN or not hasattr(tensor, "__tensor_flatten__")
