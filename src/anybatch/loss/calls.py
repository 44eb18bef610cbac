"""Calls of a loss in a step, with checks for state it changes and for state that forward wrote.

A loss may read only a micro-batch's outputs from forward. A value that forward stores elsewhere, in
an attribute or a dict, is that of the last micro-batch when the loss of the full batch is computed.
So if forward has changed a place that the loss reaches, its reads of attributes are traced.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anybatch.core import pytree
from anybatch.core.barrier import as_it_is
from anybatch.core.batch import MicroBatch
from anybatch.core.modules import keywords, leaves, unheard
from anybatch.core.oom import out_of_memory
from anybatch.core.python_state import places
from anybatch.core.rng import RNGState
from anybatch.core.transaction import BufferState, note_buffers, same_values
from anybatch.errors import LossError
from anybatch.loss.callable_loss import silent
from anybatch.loss.holders import Change, Depth
from anybatch.loss.logits import Logits
from anybatch.loss.replay import suspended
from anybatch.loss.state import LossState
from anybatch.memory.fakes import is_fake

T = TypeVar("T")


class LossCalls:
    """The calls of one step.

    Args:
        state: of the loss, as it is when the step begins.
        noted: list for the paths of state for which a loss is called once. Default: a new list.
        first: the step is the first of its signature, so values are compared. Default True.
        rehearsed: the loss has been called before the step, in rehearsals. Default True.

    Attributes:
        changed: paths of the state that the last call has changed.
        divided: gradients of micro-batches are added up while the loss is called. Default False.
        idle: `called` would do nothing but the call.
        again: two calls of the loss are to be compared.
        values: those that its function reads, as read before the first call; empty before, and
            where a call may change state.
    """

    def __init__(
        self,
        state: LossState,
        noted: list[str] | None = None,
        *,
        first: bool = True,
        rehearsed: bool = True,
    ) -> None:
        self.changed: list[str] = []
        self.divided = self.idle = False
        self.noted = [] if noted is None else noted
        self.again = first and state.written_by_person and not state.iterators
        self._rehearsed = rehearsed
        self._depth = Depth.THOROUGH if first else Depth.QUICK
        self._still = False if first else None
        self.values: list[Any] = []
        self._state, self._start = state, state.snapshot(Depth.THOROUGH if first else Depth.UNDO)
        self._left: list[Change] | None = None

    def restart(self) -> None:
        """Restore the state that the step began with."""
        self._state.restore(self._start)
        self._left, self.idle = None, False
        self._still = False if self._depth is Depth.THOROUGH else None

    def _is_still(self) -> bool:
        """Say whether no call changes state; read once, when forward has run."""
        if self._still is None:
            self._still = self._state.still(self.values)
        return self._still

    def compare(
        self,
        loss_fn: FullBatchLoss,
        outputs: Any,
        micro: MicroBatch,
        *,
        trains: bool,
        single: bool = False,
    ) -> None:
        """Compare two calls of the loss, once, in the first step of a signature.

        Args:
            loss_fn: the loss.
            outputs: of the micro-batch.
            micro: the micro-batch.
            trains: compare gradients, too.
            single: the step itself calls it once only, so it matters where dry runs have.

        Raises:
            LossError: it gives two values: it has state that is not listed.
        """
        if not self.again or (single and not self._rehearsed):
            return
        self.again = False
        noted, buffers = self._state.snapshot(Depth.THOROUGH), note_buffers(self._state.called)

        def restore() -> None:
            self._state.restore(noted)
            _put_back(buffers)

        guards = self._state.large_restored, restore
        with self._state.uncounted(self._start), silent():
            refuse_hidden(loss_fn, outputs, micro, guards, trains=trains)

    @property
    def differentiates(self) -> bool:
        """Whether the code of the loss names a derivative."""
        return self._state.differentiates

    @property
    def iterators(self) -> list[str]:
        """Paths of the iterators that the loss may draw from, which cannot be restored."""
        return self._state.iterators

    def watched(self, call: Callable[[], T]) -> T | None:
        """Return the result of a call without data; None where state changes or iterators exist.

        State that it changes is restored. A loss that draws from an iterator is not called.

        Raises:
            LossError: it reads a place that forward has changed.
        """
        if self._is_still():
            return self.called(call)
        if self._state.iterators:
            self.changed = self._state.iterators
            self.noted += self.changed
            return None
        before = self._state.snapshot(self._depth)
        buffers = note_buffers(self._state.called) if self._depth is Depth.THOROUGH else []
        misses = [cached.cache_info().misses for cached in self._state.caches]
        found = self.called(call)
        for cached, count in zip(self._state.caches, misses, strict=True):
            if cached.cache_info().misses != count:  # it would hold tensors without data
                cached.cache_clear()
        self.changed += _put_back(buffers)
        if self.changed:
            self.noted += self.changed
            self._state.restore(before)
        return None if self.changed else found

    def called(self, call: Callable[[], T]) -> T:
        """Run a call of the loss, record the state that it changes, and return its result.

        Raises:
            LossError: it reads a place that forward has changed.
        """
        if self.divided and self._state.names_grad:
            call = partial(_without_gradients, call, self._state.trained())
        state = self._state
        if self._left is None:
            self._left = state.changes(self._start, drawn=False)
        if not self._left and self._is_still():
            self.idle = not (self.divided and self._state.names_grad)
            return call()
        before = state.snapshot(self._depth)
        if self._left:
            with reads(self._left) as found, suspended():
                result = call()
            _refuse(found)
        else:
            result = call()
        self.changed = [change.path for change in state.changes(before)]
        return result


def _put_back(buffers: list[BufferState]) -> list[str]:
    moved = [buffer for buffer in buffers if buffer.written() or buffer.moved()]
    for buffer in moved:
        buffer.put_back()
    return [buffer.path for buffer in moved]


class _Gradients(TorchFunctionMode):
    """Refuses to give the gradient of some parameters: micro-batches are adding to it."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse a read of such a gradient; run all other functions."""
        kwargs = keywords(func, kwargs)
        if getattr(func, "__self__", None) is GRAD and id(args[0]) in self._parameters:
            raise LossError(
                "a loss must not read the gradients that a divided batch is adding to, and it "
                "reads .grad of a parameter of the model: compute the number before the step and "
                "pass it, or give micro_batch >= the batch size"
            )
        return func(*args, **kwargs)


GRAD: Any = vars(torch._C.TensorBase)["grad"]


class Derivatives(TorchFunctionMode):
    """Refuses derivatives by tensors that the graphs of other micro-batches lead to, too.

    The graph of a loss of all outputs ends at the outputs, and that of a micro-batch has no other
    samples: torch would return None or a part, and with ``allow_unused`` without an error.

    Args:
        trained: returns ids of the parameters of the model, and of the leaves of the batch.
        outputs: ids of the leaves that stand for outputs; None if these have their graph.
    """

    def __init__(self, trained: Callable[[], set[int]], outputs: set[int] | None) -> None:
        super().__init__()
        self._trained, self._outputs = trained, outputs
        self._error: LossError | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse a derivative; run all other functions."""
        kwargs = keywords(func, kwargs)
        if func in DIFFERENTIATES:
            by = args[1] if func is torch.autograd.grad else kwargs.get("inputs")
            every = [by] if isinstance(by, Tensor) else by or ()
            ids = {id(getattr(getattr(one, "node", None), "variable", one)) for one in every}
            if (not every or ids & self._trained()) and self._of_outputs(args[0]):
                self._error = LossError(
                    "a loss must not differentiate by parameters of the model or by inputs when "
                    "the batch is split, because its graph does not lead to those of all samples, "
                    f"and it calls {func.__name__} for one: differentiate by what the loss gets or "
                    "makes itself, compute the derivative before the step, or give micro_batch >= "
                    "the batch size"
                )
                raise self._error
        return func(*args, **kwargs)

    def _of_outputs(self, roots: Any) -> bool:
        every = [roots] if isinstance(roots, Tensor) else list(roots)
        outputs = self._outputs
        return outputs is None or any(id(leaf) in outputs for leaf in leaves(every))

    def __exit__(self, *error: Any) -> None:
        """Refuse it also where the loss has caught the error."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._error is not None and error[1] is None:
            raise self._error


DIFFERENTIATES = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


def _without_gradients(call: Callable[[], T], parameters: set[int]) -> T:
    with _Gradients(parameters):
        return call()


def _refuse(found: list[str]) -> None:
    if found:
        raise LossError(
            "a loss must compute from its outputs and targets, and it reads "
            f"{', '.join(dict.fromkeys(found))}, which forward stored elsewhere than in its "
            "outputs and which belongs to one micro-batch only: return it from the model, as one "
            "value a sample; compute a value of all samples (a mean) in the loss"
        )


@contextmanager
def reads(changes: Iterable[Change]) -> Iterator[list[str]]:
    """Collect the paths of the changed places that the body reads.

    An attribute counts as read when it is looked up, unless the body has set it. A name in a
    function (a global, a variable around it) counts as read when it is loaded.
    """
    found: list[str] = []
    classes: dict[type, dict[tuple[int, str], str]] = {}
    named: dict[str, set[str]] = {}
    for change in changes:
        if change.owner is None:
            named[change.path] = set(WORD.findall(change.path))
        else:
            paths = classes.setdefault(type(change.owner), {})
            paths[id(change.owner), change.name] = change.path
    undo = [_spied(cls, paths, found) for cls, paths in classes.items()]
    try:
        with _names_read(set().union(*named.values())) as names:
            yield found
    finally:
        for back in reversed(undo):
            back()
        found.extend(path for path, words in named.items() if words & names)


WORD = re.compile(r"[^\W\d]\w*")


@contextmanager
def _names_read(names: set[str]) -> Iterator[set[str]]:
    """Collect the names that functions of the body read, instruction by instruction.

    A function may name attributes that it does not read, in a branch that is not taken.
    """
    read: set[str] = set()
    if not names:
        yield read
        return
    codes: dict[CodeType, dict[int, Any]] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code not in codes:
            every = dis.get_instructions(code)
            codes[code] = {
                i.offset: i.argval for i in every if isinstance(i.argval, str) and i.argval in names
            }
        if not codes[code]:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in codes[code]:
            read.add(codes[code][frame.f_lasti])
        return trace

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        yield read
    finally:
        sys.settrace(before)


def _spied(cls: type, paths: dict[tuple[int, str], str], found: list[str]) -> Callable[[], None]:
    """Record attribute reads on objects of a class; return the function that ends it."""
    get: Any = cls.__getattribute__
    put: Any = cls.__setattr__
    own = {n: vars(cls)[n] for n in ("__getattribute__", "__setattr__") if n in vars(cls)}
    ids = {owner for owner, _ in paths}

    def get_and_tell(self: Any, name: str) -> Any:
        path = paths.get((id(self), name))
        if path is not None:
            found.append(path)
        elif name == "__dict__" and id(self) in ids and not _torch_asks():
            found.extend(path for (owner, _), path in paths.items() if owner == id(self))
        return get(self, name)

    def put_and_forget(self: Any, name: str, value: Any) -> None:
        paths.pop((id(self), name), None)
        put(self, name, value)

    def back() -> None:
        for name in ("__getattribute__", "__setattr__"):
            if name in own:
                type.__setattr__(cls, name, own[name])
            else:
                type.__delattr__(cls, name)

    try:
        type.__setattr__(cls, "__getattribute__", get_and_tell)
        type.__setattr__(cls, "__setattr__", put_and_forget)
    except TypeError:  # a class of C, or a function: taken for read
        found.extend(paths.values())
        return lambda: None
    return back


def _torch_asks() -> bool:
    """Return whether torch reads all attributes, as its modules do to find their tensors."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("torch.")


# Comparison of two calls of a loss, which reveals state that no walk can list.
#
# A loss may count in a file, in an extension, in an attribute of a library. So in the first step of
# a signature it is called twice on the same outputs, with one RNG state and one listed state. It
# must give the same value and the same gradient, but for rounding: kernels with atomic additions
# round in another order each time.

ROUNDING = 1000
"""Units in the last place by which two calls may differ."""

MOST = 1e-2
"""Difference that is always accepted, relative to the largest value."""

Around = Callable[[], AbstractContextManager[None]]
FullBatchLoss = Callable[[Any, MicroBatch], Tensor]


def refuse_hidden(
    loss_fn: FullBatchLoss,
    outputs: Any,
    micro: MicroBatch,
    guards: tuple[Around, Callable[[], None]],
    *,
    trains: bool,
) -> None:
    """Refuse a loss that gives two values or two gradients for the same outputs.

    Args:
        loss_fn: the loss.
        outputs: of a micro-batch.
        micro: the micro-batch.
        guards: the context of each call, which restores large tensors, and a function that restores
            the listed state after it.
        trains: compare gradients, too.
    """
    around, restore = guards
    rng_state, found, outside = RNGState.now(), list[list[Tensor]](), sys.exception()
    for _ in range(2):
        try:
            # The call must reach no barrier of other lanes, and not record its batch normalisation
            # (test_a_declared_loss_outside_may_call_it).
            with around(), as_it_is(), _unheard_by_others(outputs):
                found.append(_called(loss_fn, outputs, micro, trains=trains))
        except Exception as error:  # it takes all samples only: the step itself tells
            if out_of_memory(error, outside=outside):
                raise
            return
        finally:
            rng_state.put_back()
            restore()
    first, second = found
    if any(map(is_fake, first)) or all(map(_alike, first, second)):
        return
    a, b = (float(one[0]) for one in found)
    two = f"the values {a:g} and {b:g}" if a != b else "two gradients"
    raise LossError(
        "a loss that is called more than once a step must have state that anybatch can restore, "
        f"and it returned {two} for the same outputs: store its counts in an attribute of the loss "
        "or in a list or a tensor that it closes over (not in a file, a library or an extension), "
        "or give micro_batch >= the batch size, with which it is called once"
    )


def _unheard_by_others(outputs: Any) -> AbstractContextManager[Any]:
    """Return a context without function modes; logits in chunks have functions of their own."""
    chunked = any(isinstance(one, Logits) for _, one in pytree.tensors(outputs))
    return unheard() if chunked else torch._C.DisableTorchFunction()


def _called(
    loss_fn: FullBatchLoss, outputs: Any, micro: MicroBatch, *, trains: bool
) -> list[Tensor]:
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        if isinstance(tensor, Logits):
            logits, own = tensor.of_leaves()
            leaves.extend(own if trains and tensor.requires_grad else [])
            return logits
        copied = tensor.detach().clone()
        if trains and tensor.requires_grad:
            leaves.append(copied.requires_grad_())
            return copied.view_as(copied)  # the loss may write to it
        return copied

    with torch.set_grad_enabled(trains):
        loss = loss_fn(pytree.map_tensors(leaf, outputs), _own(micro))
    if not (leaves and loss.requires_grad):
        return [loss.detach()]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [loss.detach(), *(one for one in gradients if one is not None)]


def _own(micro: MicroBatch) -> MicroBatch:
    targets = pytree.map_tensors(lambda t: t if t.requires_grad else t.clone(), micro.targets)
    return MicroBatch(micro.inputs, targets, micro.size, micro.begin)


def _alike(a: Tensor, b: Tensor) -> bool:
    """Say whether two results are the same but for rounding."""
    if same_values(a, b):
        return True
    if a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
        return False
    every = list(places(a.shape))
    largest = torch.stack([a[place].abs().nan_to_num().amax() for place in every]).amax()
    within = min(MOST, ROUNDING * torch.finfo(a.dtype).eps) * largest
    return not any(bool(_differs(a[place], b[place], within)) for place in every)


def _differs(a: Tensor, b: Tensor, within: Tensor) -> Tensor:
    differs = ((a - b).abs().nan_to_num() > within) | (a.isnan() != b.isnan())
    return differs.any()
