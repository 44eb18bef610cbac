"""A few rows of a batch run under masks: forward, and backward where that is not torch's own.

If samples do not meet in forward, they do not meet in the derivatives that torch computes of it. An
`autograd.Function`, a hook, or a kernel of an extension has another backward: only then is one run.
Else only a graph is needed of autograd, and nothing is saved for it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from anybatch.core import modules, pytree
from anybatch.core.batch import MicroBatch
from anybatch.core.modules import keywords
from anybatch.core.oom import out_of_memory
from anybatch.execution.proof.follow import Follow
from anybatch.execution.proof.masks import ROWS, several, strange_row
from anybatch.execution.proof.notes import SAVING, ours
from anybatch.execution.proof.places import plain
from anybatch.execution.proof.verdict import UNDIVIDED

PAST = frozenset(
    getattr(Tensor, name)
    for name in (
        "__array__ __dlpack__ apply_ data_ptr map2_ map_ numpy tolist untyped_storage __reduce_ex__"
    ).split()
)
"""Calls that read the memory of a tensor without a kernel, or give Python number after number."""

SIZES = frozenset(
    (
        *(torch.equal, torch.is_same_size, torch.numel, torch.unbind),
        *(Tensor.nbytes.__get__, Tensor.shape.__get__),  # type: ignore[attr-defined]
        *(Tensor.__len__, Tensor.equal, Tensor.is_contiguous, Tensor.is_same_size, Tensor.nelement),
        *(Tensor.numel, Tensor.size, Tensor.storage, Tensor.storage_offset, Tensor.stride),
        *(Tensor.unbind, Tensor.untyped_storage),
    )
)
"""Calls that may show how many samples there are."""

CHECKS = frozenset((torch.nn.functional.one_hot,))
"""Calls that read numbers only to refuse some, if the number of classes is passed."""

TRUSTED = (
    *("anybatch.", "torch.nn.modules.", "torch.nn.functional", "torch.nn.utils.parametr"),
    "torch.nn.utils.rnn",
)
"""Modules that read sizes and compute the same for any number of samples."""


class NeededError(Exception):
    """Error of a forward that runs a backward of its own, which needs saved tensors."""


class Reads(TorchFunctionMode):
    """Take note of sizes that are read, and of reads past all kernels."""

    def __init__(self, follow: Follow) -> None:
        super().__init__()
        self._follow = follow
        self._weights = {id(one) for one in follow.model.parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the sizes and numbers that one call reads, and run it."""
        kwargs = keywords(func, kwargs)
        if func in SIZES and not (args and id(args[0]) in self._weights):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            self._follow.notes.sizes |= not caller.startswith(TRUSTED)
        self._follow.notes.sizes |= _calls_back(func, args, kwargs)
        if func is Tensor.fill_diagonal_:
            self._follow.fills_diagonal(args[0])
        read = func in PAST and not _by_proof()
        self._follow.notes.lists |= read
        if read and self._follow.has_samples(args[0]) and not ours():
            self._follow.notes.read.append((self._follow.path, "tensor"))
        pads = getattr(func, "__name__", "") == PADS
        if pads and as_long_as_the_longest(args):
            self._follow.pads(args[1])
        before = self._follow.called, self._follow.checks
        self._follow.called = True
        classes = kwargs.get("num_classes", args[1] if func in CHECKS and len(args) > 1 else -1)
        self._follow.checks |= func in CHECKS and classes > 0
        try:
            if func is Tensor.__deepcopy__ and not args[0].grad_fn and plain(args[0]):
                # It copies bytes, which are no rows
                # (test_what_forward_does_between_meetings_stays_its_own).
                found = args[0].detach().clone().requires_grad_(args[0].requires_grad)
                args[1][id(args[0])] = found
                return found
            with self._follow.packed() if _takes_packed(func, args) else nullcontext():
                found = func(*args, **kwargs)
            if pads:
                rows, lengths = found
                self._follow.padded(rows, lengths, 0 if args[2] else 1)
            return found
        except RuntimeError:  # who hears of it may take another way for such a shape
            self._follow.notes.sizes = True
            raise
        finally:
            self._follow.called, self._follow.checks = before


def _by_proof() -> bool:
    """Return whether a read is a mask lookup for a function that returns its saved tensors.

    A mode intercepts that, and also kernels below TorchScript, whose calls are not visible.
    """
    caller = sys._getframe(2)
    if not str(caller.f_globals.get("__name__", "")).startswith("anybatch.execution.proof."):
        return False
    frame: FrameType | None = caller
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(("anybatch.execution.proof.", "torch._compile", "torch._dynamo")):
            return name == "torch.autograd.function"
        frame = frame.f_back
    return False


def _calls_back(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a function of torch calls one of the user's, which no mode intercepts there."""
    if not isinstance(func, FunctionType):
        return False
    arguments = (*args, *kwargs.values())
    return not func.__module__.startswith("torch.") or any(map(callable, arguments))


PACKED = frozenset(("rnn_tanh", "rnn_relu", "gru", "lstm", "_pad_packed_sequence"))
"""torch's functions of packed sequences: data first, then how many samples each step has."""


def _takes_packed(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    if getattr(func, "__name__", "") not in PACKED or len(args) < len(("data", "sizes")):
        return False
    sizes = args[1]
    return isinstance(sizes, Tensor) and sizes.dim() == 1 and sizes.dtype == torch.int64


def samples_of_rows(size: int) -> list[int]:
    """Return the sample that each row stands for; more rows than a mask has samples are grouped."""
    return list(range(size)) if size <= ROWS else [i * ROWS // size for i in range(size)]


def forward(
    follow: Follow,
    micro: MicroBatch,
    samples: Sequence[int],
    run: Callable[..., Any],
    *,
    graph: bool,
    saved: bool,
) -> tuple[Any, bool]:
    """Run forward under masks; return its outputs, and whether a hook was registered in it.

    `run` calls the model with rows, within the context passed as `within`. `graph` builds one, and
    `saved` saves tensors for a backward.

    Raises:
        NeededError: forward needs tensors that were not saved.
    """
    hooked: list[Any] = []
    around = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if around is not None and not _copies(around[0]):
        follow.notes.where.setdefault(SAVING, "what the step is within")
    for _, tensor in pytree.tensors(micro.inputs):
        if tensor.dim() and tensor.shape[0] == micro.size:
            follow.seed(tensor, list(samples))

    def contexts() -> Iterator[AbstractContextManager[Any]]:
        yield torch.set_grad_enabled(graph)
        yield nullcontext() if saved or not graph else _saving_nothing()
        yield from (_saving(follow), _hooks(hooked), Reads(follow), follow)

    return run(micro, within=_Within(contexts)), bool(hooked)


class _Within:
    """Contexts that are entered one after the other.

    This is no generator: one that an interrupt has left behind ends when it is forgotten, and would
    then pop modes that are not its own. Those that a step has left entered the step takes off.
    """

    def __init__(self, contexts: Callable[[], Iterable[AbstractContextManager[Any]]]) -> None:
        self._contexts, self._entered = contexts, ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for one in self._contexts():
                entered.enter_context(one)
            self._entered = entered.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


@contextmanager
def _patched(holder: Any, name: str, note: Callable[..., None]) -> Iterator[None]:
    """Call `note` with the arguments of each call of a function of torch's, before it runs."""
    own = getattr(holder, name)

    def instead(*args: Any, **kwargs: Any) -> Any:
        note(*args)
        return own(*args, **kwargs)

    setattr(holder, name, instead)
    try:
        yield
    finally:
        setattr(holder, name, own)


def _hooks(found: list[Any]) -> AbstractContextManager[None]:
    """Note hooks that are registered on tensors or on nodes of a graph: all have such a handle."""

    def note(handle: RemovableHandle, *_: Any) -> None:
        if sys._getframe(2).f_globals.get("__name__") != nn.Module.__module__:  # of a module
            found.append(handle)

    return _patched(RemovableHandle, "__init__", note)


def _saving(follow: Follow) -> AbstractContextManager[None]:
    """Note hooks on saved tensors that are not torch's own (checkpoints, save_on_cpu)."""

    def note(pack: Any, _: Any) -> None:
        if not _copies(pack):
            follow.notes.where.setdefault(SAVING, follow.path)

    return _patched(torch._C._autograd, "_push_saved_tensors_default_hooks", note)


def _copies(pack: Any) -> bool:
    return (getattr(pack, "__module__", "") or "").startswith(("torch.", "anybatch."))


@contextmanager
def _saving_nothing() -> Iterator[None]:
    # A generator: where an interrupt skips its end, it removes the hooks when it is freed
    # (test_ctrl_c_as_hooks_are_put_on_or_removed_leaves_none).
    hooks = torch._C._autograd

    def own(tensor: Tensor) -> None:  # one of this body alone, by which it is found
        del tensor

    try:
        with saved_tensors_hooks(own, _needed):
            yield
    except RuntimeError as error:
        if "saved tensor hooks" in str(error):  # torch.func takes none
            raise NeededError from error
        raise
    finally:  # an interrupt may have come between the body and their end
        top = hooks._top_saved_tensors_default_hooks(False)
        if top and top[0] is own:
            hooks._pop_saved_tensors_default_hooks()


def _needed(_: None) -> Tensor:
    raise NeededError


def saving_nothing(run: Callable[[], Any]) -> Any:
    """Return run(), with a graph that saves no tensors unless run needs them."""
    try:
        with _saving_nothing():
            return run()
    except NeededError:
        return run()


def strange_backward(outputs: Any) -> bool:
    """Return whether a backward of these outputs has nodes that are not torch's own."""
    roots = [t for _, t in pytree.tensors(outputs) if t.requires_grad]
    return any(map(_is_strange, modules.nodes(roots)))


def _is_strange(node: Any) -> bool:
    if type(node).__module__ == "builtins":
        return "CppNode" in modules.name_of(node)
    made = getattr(type(node), "_forward_cls", None)
    return made is None or not made.__module__.startswith("anybatch.")


def backward(
    follow: Follow, outputs: Any, leaves: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """Run backward under masks from a gradient that each sample has of its own.

    Gradients of `leaves` are restored. Those of `inputs`, leaves with a row for each sample, must
    be only of that sample.
    """
    every = [t for _, t in pytree.tensors(outputs) if t.requires_grad]
    roots = [t for t in every if not several(follow.masks.of(t))]  # a loss inside is traced
    if not roots:
        return
    seeds = [torch.randn_like(root) for root in roots]
    for seed, root in zip(seeds, roots, strict=True):
        follow.masks.put(seed, follow.masks.of(root))
    held = [leaf.grad for leaf in leaves]
    follow.backward = True
    try:
        for leaf in leaves:
            leaf.grad = None
        with follow:
            torch.autograd.backward(roots, seeds)  # reentrant checkpoints refuse grad()
        for one in inputs:
            mask = None if one.grad is None else follow.masks.of(one.grad)
            if mask is not None and one.shape[:1] == (len(follow.samples),):
                other = strange_row(mask, 0, follow.samples) is not None
            else:
                other = several(mask)
            if other and one.grad is not None:
                place = follow.masks.origin(one.grad)
                follow.notes.backward.append(place or "the gradient of the inputs")
    finally:
        follow.backward = False
        for leaf, gradient in zip(leaves, held, strict=True):
            leaf.grad = gradient


# Check of rows that are as long as the longest row of their batch: ``pad_packed_sequence``.
#
# Without ``total_length`` its result ends where the longest row of a micro-batch ends, and a mean
# over it is another for the full batch. A few rows are made one step longer: NaN in that step shows
# whether it is read, and padding whether that matters.
#
#     rows of 3, 5 and 2 steps      out [3, 5, C]      out.mean(1): another in a batch with 6 steps
#     one step more, NaN            out [3, 6, C]      out[rows, length - 1]: as before

PADS = "_pad_packed_sequence"
"""torch's function: data, sizes of the steps, whether the batch is first, padding, steps."""

CALLER, NEAR = "pad_packed_sequence", 8
"""The function whose argument is the length, and the most frames up to it."""

ROUNDING = 1e-3
"""Relative change of a mean over a thousand steps that gets one step more."""


def as_long_as_the_longest(args: tuple[Any, ...]) -> bool:
    """Say whether a call of `PADS` pads to its longest row; a mode asks when it receives it."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(NEAR):  # other modes may have been told before
        if frame is not None and frame.f_code.co_name == CALLER:
            return frame.f_locals.get("total_length") is None
        frame = None if frame is None else frame.f_back
    return bool(args[-1] == len(args[1]))


class Longer(TorchFunctionMode):
    """Makes rows in the body one step longer than the longest, of a value or (None) the padding."""

    def __init__(self, fill: float | None = None) -> None:
        super().__init__()
        self._fill = fill

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pad one step more."""
        kwargs = keywords(func, kwargs)
        if getattr(func, "__name__", "") != PADS or not as_long_as_the_longest(args):
            return func(*args, **kwargs)
        *leading, steps = args
        padded, lengths = func(*leading, steps + 1, **kwargs)
        if self._fill is not None:
            padded.narrow(1 if args[2] else 0, steps, 1).fill_(self._fill)
        return padded, lengths


def matters(call: Callable[[], Any], outputs: Any, *, draws: bool) -> bool | None:
    """Return whether outputs depend on the length of the longest row; None where it is unknown.

    `call` runs forward on the same rows, without a graph, each time as the first time. One step
    more would change what it `draws`.
    """
    try:
        with Longer(math.nan):
            of_nan = call()
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if out_of_memory(error):
            raise
        return True  # something else is as long as the longest row
    numbers = (one for one in pytree.flat(of_nan) if one.is_floating_point())
    read = any(bool(one.isnan().any()) for one in numbers)
    if draws:
        return None if read else False
    with Longer():
        padded = call()
    if not _alike(padded, outputs):  # also where nanmean, or a comparison, has left NaN out
        return True
    return None if read or not _alike(of_nan, outputs) else False


def depends(path: str) -> str:
    """Return the refusal of outputs that depend on the longest row."""
    return (
        "the computation of a row must not depend on the other rows when the batch is split, and "
        f"pad_packed_sequence in {path} makes rows as long as the longest of a micro-batch, on "
        f"which the outputs depend: give it total_length=x.shape[1], or {UNDIVIDED}"
    )


def _alike(one: Any, other: Any) -> bool:
    pairs = zip(pytree.flat(one), pytree.flat(other), strict=True)
    return all(a.shape == b.shape and _close(a, b) for a, b in pairs)


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    # Half of the digits: a sum with one more zero may be rounded in another way
    # (test_one_step_more_matters_where_it_is_no_rounding).
    bound = min(ROUNDING, torch.finfo(a.dtype).eps ** 0.5)
    largest = max(float(b.abs().max()) if b.numel() else 0.0, torch.finfo(a.dtype).tiny)
    return bool(torch.allclose(a, b, rtol=0.0, atol=bound * largest, equal_nan=True))
