"""One walk through a model, and questions about the autograd graph of its outputs.

``named_modules`` is a chain of generators as deep as the model; walked four times a step, it costs
more than the rest of the bookkeeping together. The list made here is walked instead.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from operator import attrgetter, itemgetter
from traceback import walk_tb
from types import FrameType, NoneType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")

Modules = list[tuple[str, nn.Module]]
"""``(path, module)``, each module once, parents before children; the model's own path is ""."""


def walk(model: nn.Module) -> Modules:
    """Return every module of `model` with its path."""
    found: Modules = [("", model)]
    if model._modules:
        _walk(model, "", found, {id(model)})
    return found


def _walk(module: nn.Module, prefix: str, found: Modules, visited: set[int]) -> None:
    """Add the modules inside another one to `found`, with `prefix` before their names."""
    for name, child in module._modules.items():
        if child is None or id(child) in visited:
            continue
        visited.add(id(child))
        path = prefix + name
        found.append((path, child))
        if child._modules:
            _walk(child, f"{path}.", found, visited)


# What is found out about the modules of a step holds for later steps, too, until they change.
#
# A step asks a dozen questions of each module: its mode, its class, its settings. One comparison of
# their attributes with those of the last step answers all of them.

ITSELF: frozenset[type] = frozenset(
    (int, float, bool, str, NoneType, torch.dtype, torch.device, torch.memory_format, torch.layout)
)
"""Classes of values that can be compared as they are."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Hooks of a module, in the order in which torch calls them."""

COMPUTED = ("training", "max_norm", "running_mean", "running_var")
"""Attributes that questions read; a class that has one may compute it."""

OF_ALL = frozenset(("training", "_modules", "_buffers", *HOOKS))
"""Attributes of every module."""


class Walked(list[tuple[str, nn.Module]]):
    """The modules of a step, and answers to questions that hold while their attributes are these.

    Numbers, texts, modules and classes are compared, and names in modules of a user's. Of a tensor,
    a list or an object only the class is: it is not held, and its content may change.

    Attributes:
        answers: of `once`.
    """

    def __init__(self, modules: Modules) -> None:
        super().__init__(modules)
        self.answers: dict[Any, Any] = {}
        every = [module for _, module in modules]
        self._were = [(module, *_read(module)) for module in every if _is_readable(module)]
        self._readable = len(self._were) == len(every)

    def __reduce__(self) -> Any:
        return Walked, (list(self),)  # the questions are asked again of copies

    def unchanged(self) -> bool:
        """Say whether every answer still holds; never with hooks, or forward of an instance."""
        if not self._readable:
            return False
        for module, cls, forward, length, plain, were, inside in self._were:
            held = module.__dict__
            try:
                if (
                    type(module) is not cls
                    or cls.forward is not forward
                    or len(held) != length
                    or plain(held) != were
                    or held["_forward_pre_hooks"]
                    or held["_forward_hooks"]
                    or held["_backward_pre_hooks"]
                    or held["_backward_hooks"]
                    or (_inside(cls, held) != inside if inside else held["_modules"])
                ):
                    return False
            except KeyError:  # an attribute was deleted
                return False
        return True


def once(question: Callable[[Modules], T], modules: Modules) -> T:
    """Return the answer to a question about modules, the earlier one where nothing has changed.

    Args:
        question: reads classes, names, numbers and modes.
        modules: of a step.
    """
    if type(modules) is not Walked:
        return question(modules)
    answers = modules.answers
    if question not in answers:
        answers[question] = question(modules)
    answer: T = answers[question]
    return answer


def _is_readable(module: nn.Module) -> bool:
    """Say whether the attributes of a module are those in its dict, and torch runs its forward."""
    cls, held = type(module), module.__dict__
    stored = _stores(cls) and OF_ALL.issubset(held)  # type: ignore[arg-type]
    return stored and "forward" not in held and not any(held[hooks] for hooks in HOOKS)


@lru_cache(maxsize=1000)
def _stores(cls: type[nn.Module]) -> bool:
    """Say whether instances of a class of modules store the attributes that questions read."""
    computed = getattr(cls, "__getattribute__") is not object.__getattribute__  # noqa: B009
    own = computed or issubclass(cls, ScriptModule)
    return not own and not any(hasattr(cls, name) for name in COMPUTED)


def _read(module: nn.Module) -> tuple[Any, ...]:
    """Return the compared attributes of a module."""
    cls, held = type(module), module.__dict__
    plain = itemgetter(*(name for name, value in held.items() if type(value) in ITSELF))
    return cls, cls.forward, len(held), plain, plain(held), _inside(cls, held)


def _inside(cls: type, held: dict[str, Any]) -> list[Any]:
    """Return the modules in another one, the classes of its buffers, and a user's names."""
    inner, buffers = held["_modules"], held["_buffers"]
    found = [*inner.items(), *map(type, buffers.values())]
    if cls.__module__.startswith("torch.nn."):
        return found
    return [*found, *buffers, *held, *map(type, held.values())]


DEPTH = 16
"""Modules, each the first one inside the one before, that `first_parameter` looks into itself."""


def first_parameter(model: nn.Module) -> Tensor | None:
    """Return the first of ``model.parameters()``, past its chain of generators; None of none."""
    own = type(model).parameters is not nn.Module.parameters
    module: nn.Module | None = None if own else model
    for _ in range(DEPTH):
        if module is None:
            break
        for parameter in module._parameters.values():
            if parameter is not None:
                return parameter
        module = next(iter(module._modules.values()), None)
    return next(model.parameters(), None)


def training_modes(modules: Modules) -> tuple[bool, ...]:
    """Return `in_training` of each module, without a call for each."""
    return tuple([bool(getattr(module, "training", False)) for _, module in modules])


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


EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
"""Tested of every module of a step; ``Embedding | EmbeddingBag`` would be made anew each time."""


def parts_of_sparse(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that hold a sparse one; nothing of another."""
    layout = tensor.layout
    if layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def renormalised(modules: Modules) -> list[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    """Return the embeddings with `max_norm`, in which forward itself writes to the weights.

    torch does so in an undivided step. In a divided one, an earlier micro-batch would read a row
    before the change by a later one.
    """
    return [
        (path, module)
        for path, module in modules
        if isinstance(module, EMBEDDINGS) and module.max_norm is not None
    ]


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call `model` with a tensor, the items of a tuple or list, or the keywords of a mapping."""
    try:
        if isinstance(inputs, Tensor):
            return model(inputs)
        if isinstance(inputs, Mapping):
            return model(**inputs)
        if isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields"):
            return model(*inputs)
        return model(inputs)
    except BaseException as error:
        close_checkpoints(error)
        raise


CHECKPOINT = inspect.unwrap(checkpoint).__code__


def close_checkpoints(error: BaseException) -> None:
    """End the checkpoints that an error has left, the inner ones first.

    torch 2.11 and 2.12 end them once their frames are forgotten, and remove other hooks than theirs
    then (test_a_checkpoint_that_an_error_has_left_is_ended).
    """
    frames = [one for one, _ in walk_tb(error.__traceback__) if one.f_code is CHECKPOINT]
    for frame in reversed(frames):
        left = frame.f_locals.get("gen")
        if left is not None:
            left.close()


def storage_of(tensor: Tensor) -> int:
    """Return the id of a tensor's storage; modes are bypassed, because its address is not used.

    All of it stands on one line: an interrupt at the end of a block, where its first line runs once
    more, would leave torch without function modes.
    """
    # fmt: off
    with torch._C.DisableTorchFunction(): return int(tensor.untyped_storage()._cdata)  # noqa: E701


def storages_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return `storage_of` each tensor, at less cost; it stands on one line for the same reason."""
    # fmt: off
    with torch._C.DisableTorchFunction(): return [int(t.untyped_storage()._cdata) for t in tensors]  # noqa: E701


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled models in eager mode: dispatch modes break compiled code."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


# Questions about an autograd graph: which leaves it ends in, and whether it is all new.
#
# A loss may reach more than it was given: parameters that it closes over, or a tensor that forward
# left on a module. The first must be treated like the model's own; the second has a graph of one
# micro-batch only, and the loss of the full batch cannot be taken from it.

NONE = "does not require grad and does not have a grad_fn"
"""In torch's error for a tensor without a graph."""

UNUSED = "appears to not have been used in the graph"
"""In torch's error for an input that is not in the graph."""


def nodes(roots: list[Tensor]) -> Iterator[Any]:
    """Yield every node behind `roots`, once."""
    return _nodes([root.grad_fn for root in roots])


def behind(some: Iterable[Any]) -> Iterator[Any]:
    """Yield every node behind `some` nodes, once."""
    return _nodes([before for node in some for before, _ in node.next_functions])


def _nodes(ahead: list[Any]) -> Iterator[Any]:
    """Yield those nodes and every node behind them, once."""
    visited: set[Any] = set()
    while ahead:
        node = ahead.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        ahead.extend(before for before, _ in node.next_functions)


GRAD_FN = attrgetter("grad_fn")


def outline(roots: Iterable[Tensor]) -> int:
    """Return a hash of the names, the dimensions and the edges of a graph's nodes.

    A mean over samples and one over tokens are nodes of one name.
    """
    ahead: list[Any] = [*map(GRAD_FN, roots)]
    places: dict[Any, int] = {None: -1}
    found: list[Any] = []
    while ahead:
        node = ahead.pop()
        if node in places:
            found.append(places[node])
            continue
        places[node] = len(places)
        name, dimensions = _described(type(node))  # type: ignore[arg-type]
        found.append(name)
        for one in dimensions:
            found.append(getattr(node, one))
        for before, _ in node.next_functions:
            ahead.append(before)
    return hash(tuple(found))


SAME_NODES = {
    "ReshapeAliasBackward0": "ViewBackward0",
    "UnsafeViewBackward0": "ViewBackward0",
    "CtcLossBackward1": "CtcLossBackward0",
}
"""Nodes of functions that have another one under a meter than without
(test_a_metered_step_and_the_next_one_have_one_outline)."""


@lru_cache(maxsize=1000)
def _described(cls: type) -> tuple[str, tuple[str, ...]]:
    """Return the name of a class of nodes, and the attributes that number dimensions."""
    name = SAME_NODES.get(cls.__name__, cls.__name__)
    return name, tuple(one for one in dir(cls) if one.startswith("_saved_dim"))


SPARK = "_anybatch_spark"
"""The attribute of a dummy leaf, which exists only for the graph behind it."""


def spark(*, grad: bool) -> Tensor:
    """Return a leaf that gives its results a backward, if `grad`, and receives no gradient."""
    found = torch.zeros((), requires_grad=grad)
    setattr(found, SPARK, True)
    return found


def leaves(roots: list[Tensor]) -> list[Tensor]:
    """Return the leaf tensors for which `roots` have a gradient."""
    found = [node.variable for node in ends(roots)]
    found += [root for root in roots if root.is_leaf and root.requires_grad]
    return [leaf for leaf in found if not hasattr(leaf, SPARK)]


def ends(roots: list[Tensor]) -> list[Any]:
    """Return the AccumulateGrad nodes behind `roots`."""
    return [node for node in nodes(roots) if ends_in(node)]


def now() -> int:
    """Return the number of the newest node of this thread; later ones have larger numbers."""
    with torch.enable_grad():
        node = torch.zeros((), requires_grad=True).clone().grad_fn
    assert node is not None
    return int(node._sequence_nr())


def reaches_before(root: Tensor, moment: int) -> bool:
    """Say whether a node behind `root` is older than `moment`; leaves have no age."""
    return any(node._sequence_nr() < moment for node in nodes([root]) if not ends_in(node))


def name_of(node: Any) -> str:
    """Return torch's name of a node; a custom function may have set a `name` of its own."""
    return str(type(node).name(node))


def ends_in(node: Any) -> bool:
    """Say whether a node is where the gradient of a leaf arrives."""
    return name_of(node) == "torch::autograd::AccumulateGrad"


# Modes: the class of our dispatch modes, and the arguments that torch passes to a function mode.
#
# ``F.l1_loss(input, target, weight=w)`` reaches a mode without its weight (torch 2.6 to 2.14): with
# any mode on, the loss would be another one. The frame of the function still has it.


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode with types; operators that take functions run under it, too.

    Each subclass has a `__torch_dispatch__` of its own, and none here calls a method of it: frames
    tell who reads a size and where a draw is made, and one more of ours would be among them.
    """

    supports_higher_order_operators = True

    if TYPE_CHECKING:  # torch's have no types

        def __init__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...
        def __init_subclass__(cls, **options: Any) -> None: ...


NEAR = 6
"""Frames between a mode and the function that called it."""


def keywords(func: Callable[..., Any], kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the keyword arguments of a call, with the one that torch drops.

    Args:
        func: the function that a mode receives.
        kwargs: the keyword arguments that it receives.
    """
    kwargs = kwargs or {}
    if func is not F.l1_loss or "weight" in kwargs:
        return kwargs
    frame: FrameType | None = sys._getframe(1)
    for _ in range(NEAR):
        if frame is not None and frame.f_code is F.l1_loss.__code__:
            weight = frame.f_locals["weight"]
            return kwargs if weight is None else {**kwargs, "weight": weight}
        frame = None if frame is None else frame.f_back
    return kwargs


@contextmanager
def unheard() -> Iterator[None]:
    """Suspend all function modes in the body, which is not a part of forward."""
    with ExitStack() as stack:
        for _ in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            stack.enter_context(_pop_mode_temporarily())
        yield


class _Parts(threading.local):
    depth = 0


PARTS = _Parts()
"""Whether this thread computes a part of a layer that backward computes again: above 0."""


@contextmanager
def in_part() -> Iterator[None]:
    """Offload nothing that autograd saves in the body: its graph ends with it.

    It would be work only (`test_parts_offload_nothing_inside`).
    """
    PARTS.depth += 1
    try:
        yield
    finally:
        PARTS.depth -= 1
