"""Logits that are computed when they must be: in chunks for a loss, at once for anything else.

They hold their own computation. Functions of each row by itself are recorded, reshapes move the
rows, and a loss of torch's computes all of it in chunks. Any other function gets a tensor of all
logits, computed for it, and the report says so.

    F.linear(h, w)    Logits: h, w                    nothing is computed
    .float() / 30     Logits: h, w, [float, / 30]     recorded
    [..., :-1, :]     Logits: h[..., :-1, :], w, ...  the rows move
    cross_entropy     a number                        in chunks
    topk              values                          all logits at once, in the report
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map

from anybatch.core.modules import name_of
from anybatch.errors import LossError
from anybatch.loss import functionals
from anybatch.loss.chunked_rows import REMEDY, LogitsSource, refuse_second_derivatives
from anybatch.loss.row_functions import (
    ADDS,
    ALONG,
    LOSSES,
    MOVES,
    POINTWISE,
    added,
    along,
    loss,
    moved,
    pointwise,
)


class _Promised(torch.autograd.Function):
    """A node for logits, for gradients of other origin than a function of `Logits`.

    A checkpoint, for one, lets backward begin at its outputs.
    """

    @staticmethod
    def forward(ctx: Any, source: LogitsSource, *tensors: Tensor) -> Logits:
        """Return the logits."""
        ctx.source = source
        del tensors
        return Logits(source)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the tensors of the maps, by all logits at once."""
        refuse_second_derivatives()
        source: LogitsSource = ctx.source
        with torch.enable_grad():
            leaves = iter([one.detach().requires_grad_() for one in source.tensors])
            maps = [m.each(lambda _: next(leaves)) for m in source.maps]
            alike = replace(source, maps=tuple(maps), fixed=())
            value = alike.materialise()
        return None, *torch.autograd.grad([value], alike.tensors, gradients)


class _Values(torch.autograd.Function):
    """All values of logits that came out of another function, such as a checkpoint."""

    @staticmethod
    def forward(ctx: Any, logits: Logits) -> Tensor:  # noqa: ARG004
        """Return the logits, computed."""
        return logits._source.materialise()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        """Return the gradient of the logits."""
        return gradients[0]


def logits_of(
    source: LogitsSource,
    parents: tuple[Logits, ...] = (),
    view: Callable[[Tensor], Tensor] | None = None,
) -> Logits:
    """Return logits without data.

    Args:
        source: their computation.
        parents: logits that they are computed from. Default: none.
        view: returns them from the values of their only parent, whose memory they share. Default
            None: they share none.
    """
    found: Logits = _Promised.apply(source, *source.tensors)  # type: ignore[no-untyped-call]
    found._parents, found._view, found._trains = parents, view, _raw(found, "requires_grad")
    return found


class Logits(Tensor):
    """Result of a wide linear map, which is computed when it must be.

    Views share the values of the logits that they were made of, once these are computed.
    """

    _source: LogitsSource
    _stored: Tensor | None
    _parents: tuple[Logits, ...]
    _view: Callable[[Tensor], Tensor] | None
    _trains: bool
    _used: bool

    @staticmethod
    def __new__(cls: type[Logits], source: LogitsSource) -> Logits:
        """Return logits without data and without a graph; `logits_of` returns those with one."""
        found: Logits = Tensor._make_wrapper_subclass(
            cls, source.shape, dtype=source.dtype_now, device=source.maps[0].h.device
        )
        found._source, found._stored, found._used = source, None, False
        found._parents, found._view, found._trains = (), None, False
        return found

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return the shape and the type: the values are not there."""
        return f"Logits({list(self.shape)}, {self.dtype}, computed in chunks)"

    def of_leaves(self) -> tuple[Logits, list[Tensor]]:
        """Return the same logits of copies of the rows, and these copies, in smaller chunks.

        All gradients may be there: weights get none, which would take as much as they do
        (test_two_more_calls_of_a_loss_do_not_raise_the_floor).
        """
        source = replace(self._source.detached(), rows=-(-self._source.rows // PARTS))
        source = source.of_rows(lambda h: h.clone().requires_grad_())
        return logits_of(source), [one.h for one in source.maps]

    @property
    def stored(self) -> Tensor | None:
        """The logits, if they have been computed, or those that they are a view of."""
        if self._stored is None and self._view is not None:
            shared = self._parents[0].stored
            if shared is not None:
                with self._as_made():
                    self._stored = self._view(shared)
        return self._stored

    @property
    def few_source(self) -> LogitsSource | None:
        """Their computation in an inspection, where nothing has computed them; else None."""
        return self._source if self._source.few and self.stored is None else None

    def column(self) -> Tensor:
        """Return their first column, for a comparison of samples."""
        stored = self.stored
        return self._source.column() if stored is None else stored[..., :1]

    def materialise(self, reader: str) -> Tensor:
        """Return the logits, computed once for the function `reader`."""
        if reader in OF_GRAPH and self._used:
            raise LossError(
                f"{reader} of logits must come before their loss where they are computed in "
                "chunks, for the loss has no part in them: call it before the loss, or "
                f"{REMEDY}"
            )
        found = self.stored
        if found is not None:
            return found
        if self._view is not None:
            self._parents[0].materialise(reader)
            found = self.stored
            assert found is not None
            return found
        self._source.report.materialised[reader] += 1
        with self._as_made():  # the reader may be without a gradient
            found = self._source.materialise() if self._own else _all_values(self)
        if not in_checkpoint():  # or its second forward would save less than its first
            self._stored = found
        return found

    def usable(self) -> bool:
        """Say whether functions of them can be recorded, or computed in chunks."""
        return self.stored is None and self._own and not transformed()

    @contextmanager
    def _as_made(self) -> Iterator[None]:
        """Run the body with gradients as they were when these logits were made."""
        trains = self._trains if self._own else bool(_raw(self, "requires_grad"))
        with torch.inference_mode(mode=False), torch.set_grad_enabled(trains):
            yield

    @property
    def _own(self) -> bool:
        """Whether these are no outputs of another function of autograd."""
        node = _raw(self, "grad_fn")
        return node is None or name_of(node) == "_PromisedBackward"

    def now(self) -> LogitsSource:
        """Return their computation as of this moment: without a gradient where none is wanted."""
        wanted = torch.is_grad_enabled() or not self._trains
        return self._source if wanted else self._source.detached()

    def mark_used(self) -> None:
        """Note that a loss of them has been computed in chunks."""
        if not self._used:
            self._used = True
            for parent in self._parents:
                parent.mark_used()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a function, compute it in chunks, or compute the logits for it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args else kwargs.get("input")
        if name == "__get__":
            return _attribute(func, first)
        if name in QUERIES or (name == "type" and len(args) == 1 and not kwargs):
            return _raw_call(func, args, kwargs)
        if name in ("backward", "grad"):  # its first argument may be logits: backward begins there
            roots = _materialised(args[:1], "a backward from them")
            return func(*roots, *_materialised(args[1:], name), **_materialised(kwargs, name))
        if name in NEW and isinstance(first, Logits):
            return func(
                _empty(first), *_materialised(args[1:], name), **_materialised(kwargs, name)
            )
        if name in ("to", "type_as") and not isinstance(first, Logits):
            return func(*tree_map(_empty, args), **tree_map(_empty, kwargs))
        writes = _writes(func, name, args, kwargs)
        if isinstance(first, Logits) and first.usable() and not writes:
            found = first.answer(func, name, args, kwargs)
            if found is not None:
                return found
        elif name in ADDS and len(args) == 2 and not kwargs and isinstance(args[1], Logits):
            found = args[1].answer(func, name, args[::-1], kwargs) if args[1].usable() else None
            if found is not None:
                return found
        result = func(*_materialised(args, name), **_materialised(kwargs, name))
        return first if writes and isinstance(first, Logits) and result is first.stored else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute the logits for a kernel that is called on them, below autograd."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise LossError(
                f"logits that are computed in chunks must not be written to, and {func} may do so: "
                f"use a function that returns a new tensor, or {REMEDY}"
            )
        return func(*tree_map(_numbers, args), **tree_map(_numbers, kwargs))

    def answer(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return the result of a function without all logits at once; None where it needs them."""
        source = self.now()
        others = [one for one in tree_leaves((args[1:], kwargs)) if isinstance(one, Logits)]
        if name in ADDS and len(others) == len(args) - 1 == 1 and not kwargs:
            both = added(source, others[0].now()) if others[0].usable() else None
            return None if both is None else logits_of(both, (self, *others))
        if others:
            return None
        if name in LOSSES or name in ALONG:
            found = (loss if name in LOSSES else along)(func, name, source, args, kwargs)
            if found is not None:
                self.mark_used()
            return found
        if name in ("__iter__", "unbind"):
            return _rows_one_by_one(self, name, args, kwargs)
        if name == "contiguous" and not kwargs and len(args) == 1:
            return self if self._view is None else logits_of(source, (self,))
        if name in POINTWISE:
            changed = pointwise(func, name, source, args, kwargs)
        else:
            changed = moved(func, name, source, args, kwargs)
        if changed is None or changed is source:
            return None if changed is None else self
        if name != "detach" and name not in MOVES:
            return logits_of(changed, (self,))
        return logits_of(changed, (self,), lambda values: func(values, *args[1:], **kwargs))


def _all_values(logits: Logits) -> Tensor:
    found: Tensor = _Values.apply(logits)  # type: ignore[no-untyped-call]
    return found


def _raw(logits: Logits, name: str) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(logits, name)


def _raw_call(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _attribute(func: Any, logits: Any) -> Any:
    """Return an attribute of logits: of their values, where it needs them."""
    name = getattr(getattr(func, "__self__", None), "__name__", "")
    values = logits.stored
    if values is not None and (name not in SHAPES or name in ("grad_fn", "is_leaf")):
        return func(values)
    if name in SHAPES:
        return _raw_call(func, (logits,), {})
    if (
        name in MOVES
        and logits.usable()
        and (found := logits.answer(func, name, (logits,), {})) is not None
    ):
        return found
    return func(logits.materialise(name))


def _writes(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    if name in WRITES or "out" in kwargs:
        return True
    if name.endswith("_") and not name.endswith("__"):
        return name != "requires_grad_"
    code = getattr(func, "__code__", None)
    if code is None or "inplace" not in code.co_varnames:
        return False
    return bool(functionals.bind(func, args, kwargs).get("inplace"))


def transformed() -> bool:
    """Say whether a transform of functorch, or forward-mode differentiation, is under way."""
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return forward_mode or torch._C._functorch.peek_interpreter_stack() is not None


def in_checkpoint() -> bool:
    """Say whether saved tensors are dropped here, and computed again without this mode."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(hooks) and getattr(hooks[0], "__module__", "") == checkpoint.__name__


PARTS = 4
"""Parts of a chunk of a step, each of which is a chunk where two calls of a loss are compared."""

QUERIES = frozenset(
    "size dim ndimension numel nelement __len__ is_floating_point is_complex get_device "
    "element_size __hash__ __repr__".split()
)
"""Functions that need no values."""

NEW = frozenset("new_tensor new_zeros new_ones new_full new_empty".split())
"""Functions that return a tensor of the type and on the device of logits."""

SHAPES = frozenset(
    "shape ndim dtype device layout requires_grad is_sparse is_cuda is_quantized is_nested is_meta "
    "names itemsize is_cpu is_mps is_xpu grad_fn is_leaf".split()
)
"""Attributes that need no values."""

OF_GRAPH = frozenset(
    "grad register_hook retain_grad backward register_post_accumulate_grad_hook".split()
)
"""Readers of the graph of logits, in which a loss in chunks has no part."""

WRITES = frozenset(["__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__set__"])


def _numbers(one: Any) -> Any:
    """Return the values of logits, without a graph: below autograd there is none to store."""
    if not isinstance(one, Logits):
        return one
    if one.stored is not None:
        return one.stored.detach()
    one._source.report.materialised["a kernel"] += 1
    with torch.no_grad():
        return one._source.materialise()


def _empty(one: Any) -> Any:
    return torch.empty(0, dtype=one.dtype, device=one.device) if isinstance(one, Logits) else one


def _materialised(tree: Any, name: str) -> Any:
    return tree_map(lambda one: one.materialise(name) if isinstance(one, Logits) else one, tree)


def _rows_one_by_one(
    logits: Logits, name: str, args: Any, kwargs: Any
) -> tuple[Any, ...] | Iterator[Any] | None:
    """Return the logits of each entry of the first dimension; None for another dimension."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if dim != 0 or len(logits._source.lead) < 2 or logits._source.place >= 0:
        return None
    found = tuple(logits[place] for place in range(len(logits)))
    return found if name == "unbind" else iter(found)
