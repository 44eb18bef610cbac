"""Transaction of a step: it completes, or the state before it is restored.

torch has no transaction: an exception in the middle of an accumulation loop leaves half a gradient,
moved running statistics and drawn random numbers behind. Here the state is recorded before the
step, and restored when the step fails, by Ctrl-C too. No existing tensor is written to before the
end: existing gradients are set aside, buffers are copied.

    recorded ──> body ──> delivered       (the last part cannot be interrupted)
           └──── failed ──> restored      (nor can this)
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module signal makes an enum of each handler
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from operator import attrgetter, itemgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.overrides import _pop_mode
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils.weak import TensorWeakRef

from anybatch.core.barrier import back_to, where
from anybatch.core.hooks import LeafHooks
from anybatch.core.modules import Modules
from anybatch.core.rng import RNGState
from anybatch.errors import NotExactError


@dataclass(slots=True, eq=False)
class BufferState:
    """One buffer at one moment: where it is, which tensor it was, and its values.

    Attributes:
        tensor: the tensor itself; None where the name was registered without one.
        data: a second tensor on the same memory, which keeps shape and place when `tensor` loses
            them (``resize_``, ``.data = ...``).
        values: a copy; None where there is nothing to copy (no tensor, or one without data yet).
    """

    module: nn.Module
    name: str
    path: str
    tensor: Tensor | None
    version: int
    data: Tensor | None
    values: Tensor | None

    def now(self) -> Tensor | None:
        """Return the buffer that is registered under its name at present."""
        return _buffer(self.module, self.name)

    def written(self) -> bool:
        """Say whether torch noticed a write, or another tensor took its place.

        It costs nothing, and it misses batch_norm, whose kernel moves the running statistics
        without telling autograd.
        """
        now = self.now()
        return now is not self.tensor or _version(now) != self.version

    def moved(self) -> bool:
        """Say whether its values are others than they were."""
        now = self.now()
        if self.values is not None:
            return not same_values(now, self.values)
        return now is not self.tensor or (now is not None and not is_lazy(now))

    def put_back(self) -> None:
        """Make the buffer the tensor it was, with the values it had.

        Where a tensor cannot be written to (one with stride 0), it stays if its values have not
        changed, and is replaced by a copy if they have. One that had no data retains its new data.
        """
        self.module._buffers[self.name] = self.tensor
        if self.tensor is None or self.values is None:
            return
        with torch.no_grad():
            try:
                if self.data is not None and not _same_place(self.tensor, self.data):
                    self.tensor.data = self.data
                self.tensor.copy_(self.values)
            except Exception:  # for whatever reason, its values must come back
                if not same_values(self.tensor, self.values):
                    self.module._buffers[self.name] = self.values.clone()


def note_buffers(modules: Modules) -> list[BufferState]:
    """Return the state of every buffer of `modules`, its values copied."""
    return [
        _note(owner, name, f"{path}.{name}" if path else name, tensor)
        for path, owner in modules
        for name, tensor in owner._buffers.items()
    ]


def _note(owner: nn.Module, name: str, path: str, tensor: Tensor | None) -> BufferState:
    if tensor is None or is_lazy(tensor):
        return BufferState(owner, name, path, tensor, _version(tensor), None, None)
    data = tensor.detach()
    version = 0 if tensor.is_inference() else tensor._version
    return BufferState(owner, name, path, tensor, version, data, data.clone())


def same_values(a: Tensor | None, b: Tensor | None) -> bool:
    """Say whether two buffers are alike: shape, type and values; NaN is NaN, and None is None."""
    if a is None or b is None:
        return a is b
    if is_lazy(a) or is_lazy(b) or a is b:
        return a is b
    if (a.shape, a.dtype, a.layout, a.device) != (b.shape, b.dtype, b.layout, b.device):
        return False
    a, b = a.detach(), b.detach()
    if a.layout != torch.strided:
        return all(starmap(same_values, zip(_parts(a), _parts(b), strict=True)))
    if a.is_meta:
        return True
    if a.is_floating_point() and a.itemsize == 1:  # float8 knows no ==
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    if torch.equal(a, b):
        return True
    nan = a.is_floating_point() or a.is_complex()
    return nan and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a sparse one is made of."""
    if tensor.is_mkldnn:
        return [tensor.to_dense()]
    entries = tensor.to_sparse().coalesce()
    return [entries.indices(), entries.values()]


def _same_place(tensor: Tensor, data: Tensor) -> bool:
    if tensor.layout != torch.strided:
        return True
    same = tensor.shape == data.shape and tensor.stride() == data.stride()
    return same and tensor.data_ptr() == data.data_ptr()


def _version(tensor: Tensor | None) -> int:
    """Return torch's count of writes to a tensor; 0 where it has none."""
    if tensor is None or (not is_lazy(tensor) and tensor.is_inference()):
        return 0
    return tensor._version


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    """Return a buffer; those of a scripted module are in a wrapper, which is no dict."""
    try:
        return module._buffers[name]
    except KeyError:
        return None


GRADIENT: Callable[[Tensor], Tensor | None] = attrgetter("grad")
FIRST: Callable[[tuple[Tensor, Any]], Tensor] = itemgetter(0)


class Before:
    """Snapshot before a step: gradients, buffers, RNG state, torch's modes; open until it ends.

    The modes are here because an interrupt may come at the first instruction of an ``__exit__``,
    and its mode is then still on; `patched` holds the functions that undo other patches.

    Attributes:
        hooks: those of the leaves, after suspension.
    """

    def __init__(self, modules: Modules, parameters: Iterable[Tensor]) -> None:
        every = list(parameters)
        self.gradients = [*zip(every, map(GRADIENT, every), strict=True)]
        self._found: list[tuple[TensorWeakRef, Tensor | None]] = []
        self.hooks = LeafHooks()
        self.buffers = note_buffers(modules)
        self.rng = RNGState.now()
        self.grad_mode = torch.is_grad_enabled()
        self.modes = _len_torch_function_stack()
        self.functions_on = torch._C._is_torch_function_enabled()
        self.dispatch_modes = _len_torch_dispatch_stack()
        self._where = where()
        self.open = True
        self.patched: list[Callable[[], None]] = []
        self._modules = modules
        self._registered = {
            id(module): (dict(module._buffers), set(module._non_persistent_buffers_set))
            for _, module in modules
            if module._buffers and isinstance(module._buffers, dict)
        }

    def add(self, leaves: Iterable[Tensor]) -> None:
        """Record the gradients of more leaves, not touched yet; suspend their hooks.

        Args:
            leaves: tensors found during the step; those already recorded are skipped.
        """
        noted = {id(leaf) for leaf, _ in self._leaves()}
        more = [leaf for leaf in leaves if id(leaf) not in noted]
        self._found += [(TensorWeakRef(leaf), leaf.grad) for leaf in more]
        self.hooks.suspend(more)

    def suspend_hooks(self) -> None:
        """Let no hook of the leaves fire until `hooks` lets them."""
        self.hooks.suspend(map(FIRST, self._leaves()))

    def holds(self, leaves: Iterable[Tensor]) -> bool:
        """Say whether the step gives a gradient to one of `leaves`."""
        noted = {id(leaf) for leaf, _ in self._leaves()}
        return any(id(leaf) in noted for leaf in leaves)

    def _leaves(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return all leaves and their gradients; one that forward made may be gone."""
        if not self._found:
            return self.gradients
        found = ((held(), gradient) for held, gradient in self._found)
        return [*self.gradients, *((leaf, grad) for leaf, grad in found if leaf is not None)]

    def put_back(self) -> list[Exception]:
        """Restore all of it; return the failures, raising nothing.

        The RNG state comes first and needs nothing else; then references; then copies.
        """
        self.open = False
        failures: list[Exception] = []
        steps: list[Callable[[], None]] = [self._reset_modes, *self.patched, self.rng.put_back]
        steps.append(partial(back_to, self._where))
        steps.append(self.hooks.restore)
        steps += [partial(setattr, p, "grad", gradient) for p, gradient in self._leaves()]
        none: tuple[dict[str, Tensor | None], set[str]] = ({}, set())
        steps += [
            partial(_register_all, module, *self._registered.get(id(module), none))
            for _, module in self._modules
            if isinstance(module._buffers, dict)
        ]
        steps += [buffer.put_back for buffer in self.buffers]
        for step in steps:
            try:
                step()
            except Exception as error:
                failures.append(error)
        return failures

    def _reset_modes(self) -> None:
        torch.set_grad_enabled(self.grad_mode)
        if self.functions_on and not torch._C._is_torch_function_enabled():
            # An interrupt on the last line of its body skips its exit, and a new one was not
            # entered (test_a_step_that_fails_leaves_functions_of_torch_traced).
            torch._C.DisableTorchFunction().__exit__(None, None, None)
        while _len_torch_function_stack() > self.modes:
            _pop_mode()  # type: ignore[no-untyped-call]
        while _len_torch_dispatch_stack() > self.dispatch_modes:
            _pop_dispatch_mode()


def _register_all(module: nn.Module, noted: dict[str, Tensor | None], volatile: set[str]) -> None:
    """Register just the buffers that were, in their order."""
    buffers = module._buffers
    module._non_persistent_buffers_set = volatile
    if list(buffers) != list(noted) or any(buffers[name] is not noted[name] for name in noted):
        buffers.clear()
        buffers.update(noted)


class Delivery:
    """Last part of a step, which writes to existing state: once, and not interrupted.

    Args:
        before: the state before the step, which is open until then.
        write: writes it; where it raises, it has written nothing.
    """

    def __init__(self, before: Before, write: Callable[[], object]) -> None:
        self._before, self._write = before, write

    def __call__(self) -> None:
        """Deliver, unless that is done."""
        if self._before.open:
            with uninterrupted():
                self._write()
                self._before.open = False


@contextmanager
def transaction(before: Before, deliver: Callable[[], object]) -> Iterator[Delivery]:
    """Run the body, then `deliver`; when anything is raised before that is done, undo it all.

    Args:
        before: the state to restore.
        deliver: as `Delivery` takes it; the body may have it done before it ends.
    """
    delivery = Delivery(before, deliver)
    try:
        try:
            yield delivery
            delivery()
        except BaseException as error:
            _undo(before, error)
            raise
    # Ctrl-C, in the lines before the undoing holds it back
    # (test_ctrl_c_as_a_step_begins_to_be_undone).
    except BaseException as error:
        _undo(before, error)
        raise


def _undo(before: Before, error: BaseException) -> None:
    if not before.open:
        return
    with uninterrupted():
        failures = before.put_back()
    for failure in failures:
        error.add_note(f"and while the step was undone: {failure}")


Handler = Callable[[int, FrameType | None], Any]


class HeldBack:
    """Context that defers Ctrl-C, with the signals that have arrived and were not handled yet.

    Only the main thread gets KeyboardInterrupt, and only a Python handler can be deferred. A body
    that has to wait may raise a pending one, at a point where its state is defined.

    Args:
        once: a second one is let through at once: the body may wait for ever. Default False.
    """

    __slots__ = ("_handler", "_once", "came")

    def __init__(self, *, once: bool = False) -> None:
        self._handler: Handler | None = None
        self._once = once
        self.came: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> HeldBack:
        handler = _signal.getsignal(signal.SIGINT)
        if callable(handler):
            try:
                self._handler = handler
                _signal.signal(signal.SIGINT, self._hold)
            except ValueError:  # another thread than the main one
                self._handler = None
                if threading.current_thread() is threading.main_thread():
                    raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            _signal.signal(signal.SIGINT, self._handler)
            if self.came:
                self.let_through()

    def let_through(self) -> None:
        """Handle the first signal, where one has arrived, and drop the others."""
        if self.came and self._handler is not None:
            first = self.came[0]
            self.came.clear()
            self._handler(*first)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self.came.append((number, frame))
        if self._once and len(self.came) > 1 and self._handler is not None:
            self._handler(number, frame)


uninterrupted = HeldBack
"""Holds back Ctrl-C while the body runs, and lets it through afterwards."""


class NoOptimizerStep:
    """Context in which an optimizer that steps is refused, before it changes a parameter of a step.

    One that holds none of the step's parameters is another's business, in another thread perhaps.

    Args:
        before: the step; once it is over the hook means nothing, even if it should still be there.

    Raises:
        NotExactError: from a gradient hook that steps an optimizer.
    """

    __slots__ = ("_before",)

    def __init__(self, before: Before) -> None:
        self._before = before

    def __enter__(self) -> None:
        _global_optimizer_pre_hooks[id(self)] = self._refuse  # torch's handle takes twice as long

    def __exit__(self, *_: object) -> None:
        _global_optimizer_pre_hooks.pop(id(self), None)

    def _refuse(self, optimizer: Any, *_: Any) -> None:
        held = (p for group in optimizer.param_groups for p in group["params"])
        if self._before.open and self._before.holds(held):
            raise NotExactError(
                "parameters must not change before the full batch is done, and "
                f"{type(optimizer).__name__}.step() was called inside engine.backward, most "
                "likely by a gradient hook: remove the hook and step after engine.backward"
            )
