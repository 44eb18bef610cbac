"""Replay of a traced loss: its terms from outputs and targets, without a call of the function.

A function of the user's may do another thing in each step, so it is traced in each. A loss of
torch's may not, nor may straight-line code that calls nothing else:

    nn.CrossEntropyLoss()    F.mse_loss    lambda out, y: 0.5 * F.cross_entropy(out, y)

Their trace follows from shapes and types, and from the values that they read beside their
arguments: numbers, tensors, the attributes of a loss module. While all of these are the same, the
terms of an earlier step are those of this one, of other rows.
"""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from operator import attrgetter, is_
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import loss as torch_losses
from torch.nn.modules import module as torch_module

from anybatch.core import pytree
from anybatch.core.modules import keywords
from anybatch.core.reached import names_of, reached
from anybatch.loss import functionals
from anybatch.loss.base import Part, Total
from anybatch.loss.function_trace import LossTrace
from anybatch.loss.holders import ATOMS, same_value
from anybatch.loss.model_terms import Recipe, Recipes, touches
from anybatch.loss.terms import HOME, Term, bounded

ORIGINALS = {name: one for name, one in vars(F).items() if inspect.isfunction(one)}
"""The functionals of torch, before anything has replaced one."""

STRAIGHT = frozenset(
    "RESUME NOP CACHE PRECALL PUSH_NULL KW_NAMES COPY_FREE_VARS EXTENDED_ARG POP_TOP RETURN_VALUE "
    "RETURN_CONST LOAD_CONST LOAD_SMALL_INT LOAD_FAST LOAD_FAST_BORROW LOAD_FAST_LOAD_FAST "
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW STORE_FAST STORE_FAST_STORE_FAST STORE_FAST_LOAD_FAST "
    "LOAD_DEREF LOAD_GLOBAL LOAD_ATTR LOAD_METHOD CALL CALL_KW BINARY_OP BINARY_SUBSCR COMPARE_OP "
    "UNARY_NEGATIVE UNARY_INVERT BUILD_SLICE BINARY_SLICE BUILD_TUPLE BUILD_LIST UNPACK_SEQUENCE "
    "SWAP COPY".split()
)
"""Instructions that read and compute; none jumps, and none writes but to a local name."""
NAMES = (
    {one.__name__ for one in functionals.TABLE}
    | functionals.ELEMENTWISE
    | functionals.RESHAPES
    | functionals.PROPERTIES
    | functionals.JOINS
    | functionals.JOINED
    | functionals.PRODUCTS
    | functionals.ALONG
    | functionals.REDUCTIONS
    | functionals.NORMS
    | functionals.SPLITS.keys()
    | functionals.QUERIES
    | frozenset("nn functional squeeze unsqueeze transpose permute t T one_hot values".split())
)
"""Attributes that such code may read: none changes anything."""
OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv neg pow rpow getitem matmul eq ne lt le gt ge and "
    "rand or ror xor rxor invert floordiv mod".split()
)
VALUES = (torch, nn, F, len)
NOWHERE = object()
MOST = 100
"""Values that are compared."""

CALLED = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__")
"""Methods of a module that run its forward."""
OWN = frozenset(("forward", "_compiled_call_impl", *CALLED))
"""Attributes by which a module would run something else."""
LAYERS = [
    one
    for one in vars(torch_losses).values()
    if isinstance(one, type) and issubclass(one, nn.Module)
]
FUNCTIONALS = tuple(
    name
    for name, one in vars(F).items()
    if callable(one) and not isinstance(one, type) and type(one).__module__ != "typing"
)
FUNCTIONS = tuple(name for name in sorted(NAMES) if inspect.isroutine(vars(torch).get(name)))
OPERATED = tuple(f"__{name}__" for name in OPERATORS)
DISPATCHED = (*OPERATORS, *"div remainder bitwise_and bitwise_or bitwise_xor".split())
"""Methods that torch calls for an operator while a function mode is on."""
OF_MODULES = attrgetter(*CALLED, "__getattribute__")
HOMES = (F, torch, Tensor)
AS_IMPORTED: dict[tuple[Any, str], Any] = {
    (home, name): getattr(home, name)
    for home, names in (
        (F, FUNCTIONALS),
        (torch, FUNCTIONS),
        (Tensor, (*sorted(NAMES), *OPERATED)),
        (nn.Module, CALLED),
        *((layer, ("forward",)) for layer in LAYERS),
    )
    for name in names
    if hasattr(home, name)
}
"""Torch's functions, methods and forwards that a replayed loss may run, by their places."""

ROOTS = frozenset((*ORIGINALS.values(), *LAYERS))
"""Those that a loss may be."""

COMPILED = (
    BuiltinFunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
UNPATCHED = all(
    one.__code__.co_filename.startswith(HOME)
    if inspect.isfunction(one)
    else isinstance(one, COMPILED)
    for one in AS_IMPORTED.values()
)
"""Whether all of it was torch's own, Python in torch's folder or compiled, on import."""


def read_values(fn: Any, found: list[Any]) -> bool:
    """Collect the values that a loss reads, without its arguments; say whether these are all.

    They are not where a function of torch has been replaced, by whatever: the new one may read more
    (test_a_change_between_steps_counts).
    """
    unbound = torch.nn is nn and nn.functional is F  # as code reads them
    if not (UNPATCHED and unbound and _values(fn, found)):
        return False
    roots = list[Any]()
    for one in found:
        type_ = type(one)
        if type_ is CodeType or ((type_ is FunctionType or type_ is type) and one in ROOTS):
            roots.append(one)
    try:
        for home, read, were in _runnable(tuple(roots)):
            if read(home) != were:
                return False
    except AttributeError:  # one was deleted
        return False
    return True


@lru_cache(100)
def _runnable(roots: tuple[Any, ...]) -> list[tuple[Any, Callable[[Any], Any], Any]]:
    """Return the homes of all of torch's functions that code may run.

    With each home comes a function that reads those in it, and what that returned on import.

    Args:
        roots: the code of a loss; functions and loss modules of torch's.
    """
    ahead: list[Any] = [*roots]
    places: dict[tuple[Any, str], Any] = dict.fromkeys(
        (Tensor, name) for name in (*OPERATED, *DISPATCHED)
    )
    places |= dict.fromkeys((nn.Module, name) for name in CALLED)
    for one in ahead:  # which grows
        places |= {(one, "forward"): None} if isinstance(one, type) else {}
        run = getattr(one, "forward", one)
        for place in product(HOMES, names_of(getattr(run, "__code__", run))):
            if place not in places:
                places[place] = None
                if type(AS_IMPORTED.get(place)) is FunctionType:
                    ahead.append(AS_IMPORTED[place])
    names: dict[Any, list[str]] = {}
    for home, name in filter(AS_IMPORTED.__contains__, places):
        names.setdefault(home, []).append(name)
    every = [(home, (*some, some[0])) for home, some in names.items()]  # of two or more: a tuple
    return [
        (home, attrgetter(*some), (*(AS_IMPORTED[home, n] for n in some),)) for home, some in every
    ]


def _values(fn: Any, found: list[Any]) -> bool:
    type_ = type(fn)
    if isinstance(fn, nn.Module):
        own = () if type_ in LAYERS else _attributes(fn)
        if own is None or not _is_plain(fn) or (type_ in LAYERS and fn._modules):
            return False
        found += (type_, *vars(fn), *vars(fn).values())
        values: tuple[Any, ...] = (*fn._buffers.values(), *own)
    elif type_ is partial and not vars(fn):
        found += fn.keywords
        values = (fn.func, *fn.args, *fn.keywords.values())
    elif type_ is not FunctionType or vars(fn) or len(found) > MOST:
        return False
    elif ORIGINALS.get(fn.__name__) is fn:
        found.append(fn)
        return True
    else:
        names, attributes = _names(fn.__code__) or ((), ("",))
        if not NAMES.issuperset(attributes):
            return False
        found += (fn.__code__, *(fn.__kwdefaults__ or ()))
        named = (fn.__globals__.get(name, vars(builtins).get(name)) for name in names)
        values = (*(one.value for one in reached(fn)), *named)
    for value in values:
        if value is None:
            found.append(None)
        elif not _read(value, found):
            return False
    return True


def _attributes(fn: nn.Module) -> list[Any] | None:
    """Return attributes and globals that the forward of a loss module of the user's reads.

    None where its code is not straight, or reads what may be computed by other code.
    """
    type_, found, codes = type(fn), list[Any](), list[Any]()
    functions = [type_.forward]
    for function in functions:  # which grows by the methods that it calls
        names = _names(function.__code__) if type(function) is FunctionType else None
        if names is None or function.__closure__ or len(functions) > MOST:
            return None
        codes.append(function.__code__)
        found += (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        found += (function.__globals__.get(n, vars(builtins).get(n)) for n in names[0])
        for name in names[1]:
            value = _attribute(fn, name)
            if value is NOWHERE and name in NAMES:
                continue
            if type(value) is not FunctionType or name in vars(fn):
                found.append(value)
            elif value not in functions:
                functions.append(value)
    return [*codes, *found]


def _attribute(fn: nn.Module, name: str) -> Any:
    """Return an attribute of a module without running code; `NOWHERE` if it has none of its own.

    Methods are functions of its class.
    """
    found = inspect.getattr_static(type(fn), name, NOWHERE)
    found = NOWHERE if found is inspect.getattr_static(nn.Module, name, NOWHERE) else found
    of_class = {} if found is NOWHERE else {name: found}
    first = of_class if hasattr(type(found), "__set__") else {}  # a property, for one
    for held in (first, vars(fn), of_class, fn._buffers, fn._modules):
        if name in held:
            return held[name]
    return NOWHERE


def _is_plain(fn: nn.Module) -> bool:
    """Say whether a call of a loss module runs its forward, and nothing else."""
    return not (
        OF_MODULES(type(fn)) != OF_MODULES(nn.Module)
        or not OWN.isdisjoint(vars(fn))
        or fn._parameters
        or fn._forward_hooks
        or fn._forward_pre_hooks
        or fn._backward_hooks
        or fn._backward_pre_hooks
        or torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def _read(value: Any, found: list[Any]) -> bool:
    """Collect a value that a loss reads; of a function or a module the values that it reads."""
    if type(value) is Tensor:
        found += (value, *value.shape, value.dtype, value.layout, str(value.device))
        return not (value.requires_grad or vars(value))
    if type(value) in ATOMS or type(value) is CodeType or any(value is one for one in VALUES):
        found.append(value)
        return True
    # Code may read an attribute of a module, and not call it.
    if isinstance(value, nn.Module) and type(value) not in LAYERS:
        return False
    return _values(value, found)


@lru_cache(MOST)
def _names(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the globals that straight-line code reads, and the attributes.

    None for any other code.
    """
    found, attributes = [], []
    for one in dis.get_instructions(code):
        writes = one.opname == "BINARY_OP" and one.argrepr.endswith("=")
        if one.opname not in STRAIGHT or writes:
            return None
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.append(one.argval)
        if one.opname == "LOAD_GLOBAL":
            found.append(one.argval)
    return tuple(dict.fromkeys(found)), tuple(dict.fromkeys(attributes))


def same_values(now: Sequence[Any], was: Sequence[Any]) -> bool:
    """Say whether values are the same objects, or equal numbers and texts."""
    return len(now) == len(was) and (all(map(is_, now, was)) or all(map(same_value, now, was)))


OF_TENSOR = attrgetter("shape", "dtype", "device", "layout", "requires_grad")
"""Properties of a tensor on which the trace of a loss depends."""


def form_of(
    outputs: Any, targets: Any, tensors: list[Tensor] | None = None
) -> tuple[Any, ...] | None:
    """Return shapes and types of some rows, and add the tensors to a list, in order.

    None where they are more than plain tensors.
    """
    found, ahead = list[Any](), [targets, outputs]
    tensors = [] if tensors is None else tensors
    while ahead:
        tree = ahead.pop()
        type_ = type(tree)
        if type_ is Tensor:
            found += OF_TENSOR(tree)
            tensors.append(tree)
            continue
        found.append(type_)
        if type_ is tuple or type_ is list:
            found.append(len(tree))
            ahead += reversed(tree)
        elif type_ is dict:
            found += (len(tree), *tree)
            ahead += reversed(tree.values())
        elif type_ in ATOMS:
            found.append(tree)
        else:
            return None
    return tuple(found)


class RecipeTrace(LossTrace):
    """Trace that records the computation of tensors from outputs and targets, too."""

    def __init__(self, outputs: Any, targets: Any, size: int, device: torch.device) -> None:
        super().__init__(outputs, targets, size, device)
        self.recipes = Recipes((outputs[0], targets))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and record it."""
        kwargs = keywords(func, kwargs)
        result = super().__torch_function__(func, types, args, kwargs)
        if touches(func):
            self.recipes.follow(func, args, kwargs, result)
        return result


BY = "divided by"
"""Name of the weights whose sum divides a term, among its arguments."""


def is_own(term: Term) -> bool:
    """Say whether a term is of values that the loss computes, or divided by a sum of them."""
    return term.by is not None or term.function not in functionals.LISTED


Sources = list[dict[str, Recipe]]
"""For each term, the computation of its arguments from the tensors of outputs and targets."""


def recipes_of(
    terms: Sequence[tuple[float, Term]], trace: LossTrace, values: list[Any]
) -> Sources | None:
    """Return the computation of all arguments of terms; None where it is unknown."""
    assert isinstance(trace, RecipeTrace)
    fixed, found = {id(one) for one in values}, []
    called = any(is_own(term) for _, term in terms)
    for _, term in terms:
        tensors = {n: a for n, a in term.arguments.items() if isinstance(a, Tensor)}
        if term.by is not None:
            tensors = {BY: term.by.values}
        elif called and (is_own(term) or not term.divides):
            tensors = {}  # its shapes decide its denominator, and its numerator comes of a call
        recipes = {n: trace.recipes.of(a) for n, a in tensors.items() if id(a) not in fixed}
        found.append({n: recipe for n, recipe in recipes.items() if recipe is not None})
        if len(found[-1]) < len(recipes):
            return None
    return found


@dataclass(frozen=True)
class ReplayedCall:
    """One call of a functional in a loss.

    Attributes:
        weight: c of the term.
        term: the call for the full batch, without data.
        places: arguments that are tensors of outputs or targets, by their places among these.
        recipes: arguments that are computed from these tensors.
        divides: the sum is divided by a count.
        fixed: the count, where the shapes of a batch decide it. Default None.
    """

    weight: float
    term: Term
    places: dict[str, int]
    recipes: dict[str, Recipe]
    divides: bool
    fixed: Any = None

    def count(self, tensors: list[Tensor]) -> Any:
        """Return the denominator of the full batch.

        Args:
            tensors: of outputs, which need no data, and of targets.
        """
        by = self.term.by
        if by is not None:
            recipe = self.recipes.get(BY)
            weights = tensors[self.places[BY]] if recipe is None else recipe.made(tensors)
            return bounded(weights.sum(), by.bounds)
        if self.fixed is not None:
            return self.fixed
        entry, arguments = functionals.TABLE[self.term.function], self.term.arguments.copy()
        for name in entry.reads:  # others may be computed from outputs, which have no data
            if name in self.places:
                arguments[name] = tensors[self.places[name]]
            elif name in self.recipes:
                arguments[name] = self.recipes[name].made(tensors)
        return entry.count(arguments)


class Replay:
    """The calls of functionals that make up a loss of the full batch.

    Attributes:
        forms: of the rows that were compared with the full batch.
        name: of the loss.
        called: micro-batches call the loss: it computes values of its own, perhaps from one
            another, and only the trace of the full batch is saved.
    """

    def __init__(
        self,
        values: list[Any],
        terms: Sequence[tuple[float, Term]],
        sources: Sources,
        outputs: Any,
        trace: Any,
    ) -> None:
        self.forms: set[Any] = set()
        self.name = " + ".join(dict.fromkeys(term.name for _, term in terms))
        self._values, self._outputs, self._calls = values, pytree.flat(outputs), []
        self.called = any(map(is_own, (term for _, term in terms)))
        trace = replace(trace, replay=self)
        for (weight, term), recipes in zip(terms, sources, strict=True):
            places = {n: one.args[0] for n, one in recipes.items() if one.function is None}
            made = {n: one for n, one in recipes.items() if one.function is not None}
            own = replace(term, trace=trace)
            entry = functionals.TABLE.get(own.function)
            reads = entry is not None and own.divides and entry.reads
            fixed = None if own.by is not None or reads else own.denominator()
            self._calls.append(ReplayedCall(weight, own, places, made, own.divides, fixed))

    def holds(self, values: list[Any]) -> bool:
        """Say whether nothing that the loss reads has changed."""
        return same_values(values, self._values)

    def totals(self, targets: Any) -> list[Total]:
        """Return the terms of the full batch, with their denominators."""
        tensors, totals = [*self._outputs, *pytree.flat(targets)], []
        for call in self._calls:
            totals.append(Total(call.weight, call.count(tensors), call.term))
        return totals

    def parts(self, tensors: list[Tensor]) -> list[Part]:
        """Return the numerators of some rows, of the tensors of outputs and targets."""
        parts = []
        for call in self._calls:
            function, arguments = call.term.function, call.term.arguments.copy()
            for name, place in call.places.items():
                arguments[name] = tensors[place]
            for name, recipe in call.recipes.items():
                arguments[name] = recipe.made(tensors)
            count = functionals.TABLE[function].count
            parts.append(
                Part(
                    functionals.numerator(function, arguments),
                    partial(count, arguments) if call.divides else partial(int, 1),
                )
            )
        return parts


class Replays(dict[Any, Replay]):
    """Replays by the form of a step; a copy of a loss has none, for it may hold other tensors."""

    def __reduce__(self) -> tuple[type[Replays], tuple[()]]:
        return Replays, ()


SUSPENDED = [0]
"""How many losses are being called for what they read: none is replayed meanwhile."""


@contextmanager
def suspended() -> Iterator[None]:
    """Let losses be called in the body, and none be replayed."""
    SUSPENDED[0] += 1
    try:
        yield
    finally:
        SUSPENDED[0] -= 1
