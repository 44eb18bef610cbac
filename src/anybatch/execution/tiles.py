"""Modules that act on each token by itself, in tiles of tokens that backward computes again.

An MLP is several times as wide inside as at its border, and autograd saves all of that for every
token. But no token needs another one there. So forward computes one tile of tokens after the other
and keeps only the input; backward computes each tile again, with a graph, and adds its part of the
gradients.

    at once    x [T, C] ──> [T, 4 C] ──> [T, C]                      T x 4 C numbers, several times
    in tiles   x[0:t] ──> [t, 4 C] ──> [t, C] │ x[t:2t] ──> ...      t x 4 C numbers, computed twice

No class of modules is named. A module is tried when it is first called with one tensor: the proof
that samples do not meet (`anybatch.execution.inspection`) is applied to its tokens. A module that
does not pass is computed at once: tokens meet in it, or it computes with their place or number; it
draws, writes to a buffer or stores a value; it has hooks inside, or a backward of its own.

Source: u-cuDNN's conclusion, which asks for other layers than convolutions; AGBN's "memory monger".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling as compiling
from torch.jit import ScriptModule
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from anybatch.core import modules as graph
from anybatch.core.barrier import PLAIN, looks_here
from anybatch.core.modules import in_part, is_spread, tensors_of, unheard, walk
from anybatch.core.oom import out_of_memory
from anybatch.core.python_state import Attributes, PythonState
from anybatch.core.retry import Retry
from anybatch.core.rng import RNGState
from anybatch.core.transaction import uninterrupted
from anybatch.distributed.local_batch import LocalBatch
from anybatch.errors import NotYetError
from anybatch.execution.buffers import ForwardBuffers
from anybatch.execution.gradients import Gradients
from anybatch.execution.inspection import inspect_model
from anybatch.execution.outside import Outside, parts, plain_numbers, read_held
from anybatch.execution.prefetch import HostLink
from anybatch.execution.proof.rows import saving_nothing, strange_backward
from anybatch.execution.signature import FirstRows
from anybatch.execution.step import Step
from anybatch.loss.callable_loss import CallableLoss
from anybatch.loss.chunked import WIDE as CHUNKED
from anybatch.loss.logits import in_checkpoint, transformed
from anybatch.memory.fakes import is_fake

FEW = 4
"""Tokens on which a module is tried, and the fewest of a tile."""

SETTINGS = (bool, int, float, str, tuple)
"""Types of the attributes of a module that are compared, of torch's own modules, too."""

WIDE = 2
"""Times the bytes of its input that a module must save beside it, or tiles would gain little."""

NO_DERIVATIVE = (
    "a module that is computed in tiles of tokens has no second derivative today, and a backward "
    'with create_graph=True asks for it: leave "tiles" out of rungs, or give more memory'
)

FORWARD = "forward"

ROUNDING = 8
"""Units of rounding by which a tile that is computed again may differ in its mean and its size."""


class Tiles:
    """Run modules that act on each token by itself in tiles of tokens, while a model is called.

    Args:
        size: tokens of a tile, of each sample; `FEW` at least.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._lengths: set[int] = set()
        self._inside = False
        self._originals: dict[int, nn.Module] = {}
        self._verdicts: WeakKeyDictionary[nn.Module, dict[Any, _Verdict]] = WeakKeyDictionary()
        self._moving: WeakSet[nn.Module] = WeakSet()
        self._called: WeakSet[_Tile] = WeakSet()

    def of_copy(self, model: nn.Module, copied: nn.Module) -> Tiles:
        """Return the tiles of a copy without data; its modules are tried in the model itself."""
        found = Tiles(self.size)
        found._lengths, found._verdicts = self._lengths, self._verdicts
        found._moving = self._moving
        pairs = zip(walk(copied), walk(model), strict=True)
        found._originals = {id(twin): original for (_, twin), (_, original) in pairs}
        return found

    @property
    def longest(self) -> int:
        """The most tokens of a sample that a module in tiles was called with; 0 where none was."""
        return max(self._lengths, default=0)

    def run(self, model: nn.Module, forward: Callable[[], Any]) -> Any:
        """Return ``forward()``, which calls the model, with its modules in tiles where they may."""
        placed: list[nn.Module] = []
        self._called.clear()
        self._inside = False  # an interrupt may have skipped the end of an earlier call
        try:
            for module in _candidates(model):
                placed.append(module)
                module.__dict__.pop(FORWARD, None)
                module.__dict__[FORWARD] = _Forward(self, module, module.forward)
            return forward()
        finally:
            with uninterrupted():
                for module in placed:
                    module.__dict__.pop(FORWARD, None)

    @contextmanager
    def within(self) -> Iterator[None]:
        """Call modules in the body as they are: they are inside of one that is in tiles."""
        was, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = was

    def call(self, module: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module, in tiles where these are shown to be the same."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if self._inside or not isinstance(x, Tensor) or not self._may_be(x):
            return own(*args, **kwargs)
        rows = max(FEW, self.size // prod(x.shape[2:-1]))
        original = self._originals.get(id(module), module)
        if original in self._moving or x.shape[1] <= rows:
            return own(*args, **kwargs)
        with self.within(), _as_written(original):
            verdict = self._verdict(original, x, rows)
        if not verdict.tokenwise:
            return own(*args, **kwargs)
        self._lengths.add(prod(x.shape[1:-1]))
        tile = _Tile(self, module, original, own, rows, verdict.outside)
        if looks_here():
            return tile.joined(x)
        tile.leaves, rest = _tensors(module)
        tile.was = tile.now()
        self._called.add(tile)
        return _InTiles.apply(tile, x, *tile.leaves, *rest)  # type: ignore[no-untyped-call]

    def _verdict(self, module: nn.Module, x: Tensor, rows: int) -> _Verdict:
        """Find whether a module acts on each token by itself, as in `x`; try it where unknown."""
        every = walk(module)
        now = _as_it_is(every)
        samples, length, *others = x.shape
        form = (0 if is_fake(x) else samples, *others, x.dtype, x.device, rows)
        form = (*form, torch.is_grad_enabled(), *(v for one in _autocast(x) for v in one.values()))
        tried = self._verdicts.setdefault(module, {})
        for of in (0, length):
            found = tried.get((form, of))
            if found is not None and found.holds(now):
                return found
        outside = Outside(one for _, one in every)
        numbers, state = outside.numbers(), PythonState()
        if numbers:
            state.modules((one for _, one in every), attributes=True)
        tokenwise, of = _trial(module, x, rows)
        tokenwise &= outside.numbers() == numbers  # or a call counts somewhere else
        state.put_back()
        tried[form, of] = found = _Verdict(tokenwise, (now, numbers), outside)
        return found

    def forget(self, module: nn.Module) -> None:
        """Try a module again when it is called the next time."""
        self._verdicts.pop(module, None)

    def compare(self, tile: _Tile) -> None:
        """Run modules untiled that have changed since they were called: backward would differ.

        Raises:
            Retry: the module of this tile is one of them.
        """
        if tile.moved():
            self.untile([one for one in self._called if one.moved()])

    def untile(self, called: Iterable[_Tile] | None = None) -> NoReturn:
        """Run the step again with modules untiled; by default all that were called in tiles."""
        called = self._called if called is None else called
        self._moving.update(one.original for one in called)
        raise Retry("inspection")

    @staticmethod
    def _may_be(x: Tensor) -> bool:
        plain = type(x) in PLAIN or is_fake(x)
        if not plain or x.dim() < 3 or x.layout != torch.strided or not x.numel():
            return False
        if not x.is_floating_point() or x.is_inference() or x.device.type == "meta":
            return False
        return not (compiling() or in_checkpoint() or transformed())


class _Forward:
    """Stands in for the forward of a module while a model is called."""

    __slots__ = ("_module", "_own", "_tiles")

    def __init__(self, tiles: Tiles, module: nn.Module, own: Callable[..., Any]) -> None:
        self._tiles, self._module, self._own = tiles, module, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tiles.call(self._module, self._own, args, kwargs)


def _candidates(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of which the forward may be replaced for a while."""
    every = walk(model)
    compiled = [path for path, module in every if _is_compiled(module)]
    for path, module in every:
        near = any(_contains(path, one) or _contains(one, path) for one in compiled)
        if not near and isinstance(module.__dict__.get(FORWARD), _Forward | None):
            yield module


def _is_compiled(module: nn.Module) -> bool:
    """Say whether a module is compiled, or a wrapper of one that sends to other ranks."""
    compiled = hasattr(module, "_orig_mod") or module.__dict__.get("_compiled_call_impl")
    wraps = type(module).__module__.startswith(("torch.nn.parallel", "torch.distributed"))
    return bool(compiled) or wraps or isinstance(module, ScriptModule)


def _contains(path: str, other: str) -> bool:
    return not path or path == other or other.startswith(f"{path}.")


@contextmanager
def _as_written(module: nn.Module) -> Iterator[None]:
    """Run the body with the user's own forwards in a module and all that it holds."""
    replaced = [
        (one.__dict__, one.__dict__.pop(FORWARD))
        for one in module.modules()
        if isinstance(one.__dict__.get(FORWARD), _Forward)
    ]
    try:
        yield
    finally:
        for held, forward in replaced:
            held[FORWARD] = forward


# Tiles of one call: forward without a graph, and backward.


@dataclass(eq=False)
class _Tile:
    """Computation of a module in tiles, of `rows` entries along the second dimension.

    Attributes:
        original: the module that was tried; `module` may be its copy.
        own: the module's forward.
        outside: numbers that its code reads elsewhere.
        leaves: parameters that get a gradient.
        autocast: enters the modes of autocast of the call again.
        was: the state of the module when it was called; and its tensors, or others would have
            their ids.
        results: mean and root mean square of the result of each tile [n, 2].
    """

    tiles: Tiles
    module: nn.Module
    original: nn.Module
    own: Callable[[Tensor], Tensor]
    rows: int
    outside: Outside
    leaves: list[Tensor] = field(default_factory=list)
    autocast: list[dict[str, Any]] = field(default_factory=list)
    was: tuple[Any, list[Tensor]] = (None, [])
    results: Tensor | None = None

    def now(self) -> tuple[Any, list[Tensor]]:
        """Return the present state of the module, and its tensors."""
        every, elsewhere = walk(self.module), self.outside.tensors()
        with _as_written(self.module):
            held = tree_leaves([elsewhere, *(dict(vars(one)) for _, one in every)])
            tensors = [one for one in held if isinstance(one, Tensor)]
            places = [*map(_place, tensors)]
            return (_as_it_is(every), self.outside.numbers(), places), tensors

    def moved(self) -> bool:
        """Say whether the module has changed since it was called."""
        return bool(self.was[0] != self.now()[0])

    def spans(self, x: Tensor) -> list[tuple[int, int]]:
        """Return where each tile begins, and its length; of fakes, two stand for all."""
        length = x.shape[1]
        found = [(at, min(self.rows, length - at)) for at in range(0, length, self.rows)]
        return found[:2] if is_fake(x) else found

    def measured(self, found: Tensor, begin: int, length: int, others: Tensor | None) -> Tensor:
        """Return those of all tiles [n, 2], with mean and root mean square of one that begins so.

        Those of fakes are as large (test_tiles_are_planned_where_no_sample_fits_otherwise).
        """
        found = found.detach()
        others = found.new_empty((-(-length // self.rows), 2)) if others is None else others
        size = torch.linalg.vector_norm(found) / found.numel() ** 0.5
        others[begin // self.rows] = torch.stack([found.mean(), size])
        return others

    def joined(self, x: Tensor) -> Tensor:
        """Return the result, with a graph of all tiles where there is one."""
        with self.tiles.within():
            parts = [self.own(x.narrow(1, *span).contiguous()) for span in self.spans(x)]
        rest = x.shape[1] - sum(one.shape[1] for one in parts)
        if rest:
            parts.append(parts[0].new_empty((x.shape[0], rest, *parts[0].shape[2:])))
        return torch.cat(parts, 1)

    def compute(self, x: Tensor, span: tuple[int, int], *, trains: bool) -> tuple[Tensor, Tensor]:
        """Return one tile of `x` as a leaf, and its result with a graph."""
        part = x.narrow(1, *span).detach().contiguous().requires_grad_(trains)
        with ExitStack() as modes:
            for one in self.autocast:  # without its cache, which would keep the graph of a tile
                modes.enter_context(torch.autocast(**one, cache_enabled=False))
            with torch.enable_grad(), self.tiles.within():
                return part, self.own(part)


def _leads_out(found: Tensor, inside: list[Tensor], first: int) -> bool:
    """Say whether a graph leads to a leaf outside of a module, or to a node before its `first`."""
    leaves = {*map(id, inside)}
    for node in graph.nodes([found]):
        leaf = getattr(node, "variable", None)
        if id(leaf) not in leaves if leaf is not None else node._sequence_nr() < first:
            return True
    return False


def _place(value: Tensor) -> Any:
    """Return the identity, the storage and the version of a tensor."""
    version = None if value.is_inference() else value._version
    return id(value), None if is_fake(value) else graph.storage_of(value), version


def _tensors(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters and buffers of a module that get a gradient, and the others."""
    names = ("_parameters", "_buffers")
    every = dict.fromkeys(t for name in names for t in tensors_of(module.modules(), name))
    return [t for t in every if t.requires_grad], [t for t in every if not t.requires_grad]


def _autocast(x: Tensor) -> list[dict[str, Any]]:
    """Return the present state of autocast, of each type of device that a module may compute on."""
    return [
        {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
        }
        for device in dict.fromkeys((x.device.type, "cpu"))
    ]


class _InTiles(torch.autograd.Function):
    """A module on tiles of its input; saves the input, and computes each tile again."""

    @staticmethod
    def forward(ctx: Any, tile: _Tile, x: Tensor, *tensors: Tensor) -> Tensor:
        ctx.tile = tile
        ctx.save_for_backward(x, *tensors)  # parameters for their versions, as torch checks them
        tile.autocast = _autocast(x)
        drawn, out, first = _draws(), None, torch._C._autograd._get_sequence_nr()
        outside, tile.results = False, None
        for begin, length in tile.spans(x):
            run = partial(tile.compute, x, (begin, length), trains=x.requires_grad)
            part, found = saving_nothing(run)
            if out is None:
                outside = _leads_out(found, [part, *tile.leaves], first)
                out = found.new_empty((*x.shape[:-1], found.shape[-1]))
            out.narrow(1, begin, length).copy_(found.detach())
            tile.results = tile.measured(found, begin, x.shape[1], tile.results)
            del part, found
        assert isinstance(out, Tensor)
        # Where it was tried it did neither.
        if outside or not (is_fake(x) or _draws().same_as(drawn)):
            tile.tiles.forget(tile.module)
            raise Retry("inspection")
        return out

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise NotYetError(NO_DERIVATIVE)
        tile: _Tile = ctx.tile
        tile.tiles.compare(tile)
        x, trains = ctx.saved_tensors[0], ctx.needs_input_grad[1]
        below = torch.empty_like(x) if trains else None
        sums: list[Tensor | None] = [None] * len(tile.leaves)
        results = None
        for begin, length in tile.spans(x):
            with in_part():
                part, found = tile.compute(x, (begin, length), trains=trains)
            wanted = [*([part] if trains else []), *tile.leaves]
            above_part = above.narrow(1, begin, length)
            gradients: list[Tensor | None] = [
                *torch.autograd.grad(found, wanted, above_part, allow_unused=True)
            ]
            results = tile.measured(found, begin, x.shape[1], results)
            del part, found
            if below is not None:
                gradient = gradients.pop(0)
                rows = below.narrow(1, begin, length)
                rows.zero_() if gradient is None else rows.copy_(gradient)
            for at, leaf in enumerate(tile.leaves):
                sums[at] = _added(sums[at], gradients[at], leaf)
                gradients[at] = None
        if not (is_fake(x) or _same(tile.results, results)):
            tile.tiles.untile()  # something else has changed, and nobody knows where
        every = [
            None if s is None else s.to(p.dtype) for s, p in zip(sums, tile.leaves, strict=True)
        ]
        rest = len(ctx.needs_input_grad) - len(every) - 2
        return None, below, *every, *[None] * rest


def _same(ones: Tensor | None, others: Tensor | None) -> bool:
    """Say whether results are the same, but for rounding in another order and for NaN."""
    assert ones is not None
    assert others is not None
    bound = ROUNDING * torch.finfo(others.dtype).eps * others[:, 1:]
    return not bool(((ones - others).abs() > bound).any())


def _draws() -> RNGState:
    with _disable_current_modes():
        return RNGState.now()


def _added(total: Tensor | None, gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """Return the sum over tiles; in float32 for half precision, which would round each of them."""
    if gradient is None:
        return total
    if total is None:
        half = leaf.dtype.itemsize < torch.float32.itemsize
        return gradient.to(torch.float32 if half else leaf.dtype, copy=True)
    return total.add_(gradient)


# Whether a module acts on each token by itself.


@dataclass(frozen=True)
class _Verdict:
    """Result of a trial.

    Attributes:
        tokenwise: tiles are the same.
        model: the module as it was: its forwards, hooks, numbers and modes.
        outside: numbers that its code reads elsewhere.
    """

    tokenwise: bool
    model: Any
    outside: Outside

    def holds(self, now: Any) -> bool:
        """Say whether the module is still as it was tried."""
        return bool(self.model == (now, self.outside.numbers()))


def _as_it_is(every: graph.Modules) -> Any:
    """Return the forwards, hooks, modes and numbers of modules, for comparison."""
    numbers, _, held = plain_numbers(every)
    settings = [
        (name, value)
        for _, module in every
        for name, value in module.__dict__.items()
        if type(value) in SETTINGS
    ]
    return parts(every), tuple((numbers | read_held(held)).items()), tuple(settings)


def _trial(module: nn.Module, x: Tensor, rows: int) -> tuple[bool, int]:
    """Say whether a module acts on each token by itself, and in how many; 0 is in any number."""
    inside = [one for _, one in walk(module)[1:]]
    if any(_hooked(one) for one in inside) or any(map(is_spread, module.parameters())):
        return False, 0
    attributes = Attributes([module, *inside])
    with _disable_current_modes(), unheard(), saved_tensors_hooks(_detached, _detached):
        buffers, start = tensors_of(module.modules(), "_buffers"), RNGState.now()
        copies = [(one, one.clone()) for one in buffers]
        try:
            few = _tokens(module, x, rows)
            before = RNGState.now()
            if not _worth(module, few[:, :FEW].clone(), attributes):
                return False, 0
            if not RNGState.now().same_as(before) or _moved(copies):
                return False, 0
            return _meet_nowhere(module, few, x.shape[1], rows)
        except Exception as error:  # whatever a module does with four tokens: it is left whole
            if out_of_memory(error):
                raise
            return False, 0
        finally:
            attributes.put_back()
            start.put_back()
            for one, copied in _moved(copies):
                one.copy_(copied)


def _tokens(module: nn.Module, x: Tensor, rows: int) -> Tensor:
    """Return the tokens to try: those of `x`, or as many as a tile has where it has no data."""
    if not is_fake(x):
        return x.detach()
    shape, parameter = (1, min(x.shape[1], rows), *x.shape[2:]), graph.first_parameter(module)
    device = x.device if parameter is None else parameter.device  # that of `x` may be absent
    return torch.randn(shape, dtype=torch.float32, device=device).to(x.dtype)


def _moved(copies: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return the buffers that are no longer as their copies are: batch norm tells no version."""
    return [(one, copied) for one, copied in copies if not torch.equal(one, copied)]


def _detached(value: Tensor) -> Tensor:
    """Return a tensor without its graph: hooks that return their own tensor keep it for good."""
    return value.detach()


def _hooked(module: nn.Module) -> bool:
    return any(held for name, held in module.__dict__.items() if name.endswith("_hooks") and held)


def _worth(module: nn.Module, few: Tensor, attributes: Attributes) -> bool:
    """Say whether a module saves much more than its input, and nothing of it stays or leads out."""
    leaves, rest = _tensors(module)
    places, saved = {graph.storage_of(one) for one in (few, *leaves, *rest)}, dict[int, int]()

    def save(one: Tensor) -> Tensor:
        place = graph.storage_of(one)
        if place not in places:
            saved[place] = one.untyped_storage().nbytes()
        return _detached(one)

    versions = [(one, one._version) for one in (few, *leaves, *rest)]
    few.requires_grad_()
    first = torch._C._autograd._get_sequence_nr()
    with torch.enable_grad(), saved_tensors_hooks(save, _detached):
        found = module.forward(few)
    tensor = isinstance(found, Tensor) and type(found) in PLAIN and found is not few
    if not tensor or found.shape[:-1] != few.shape[:-1] or strange_backward(found):
        return False
    if any(one._version != version for one, version in versions) or attributes.changed():
        return False
    # The head of a vocabulary is in chunks, which need all of its rows.
    if _leads_out(found, [few, *leaves], first) or found.shape[-1] > CHUNKED * few.shape[-1]:
        return False
    return bool(sum(saved.values()) > WIDE * few.numel() * few.element_size())


class _Tokens(nn.Module):
    """A module with the dimension of the tokens first; its own hooks are not called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.module.forward(tokens.transpose(0, 1).contiguous())
        return found.transpose(0, 1)


def _meet_nowhere(module: nn.Module, x: Tensor, length: int, rows: int) -> tuple[bool, int]:
    """Say whether it is shown, by the proof for samples, that tokens do not meet in a module."""
    tokens, there = x.transpose(0, 1), x.shape[1]
    step = Step(
        model=_Tokens(module),
        loss=CallableLoss(torch.sum),  # never called
        batch=FirstRows(tokens, None, length, there, -(-there // rows)),
        micro_batch=rows,
        link=HostLink(x.device),
        buffers=ForwardBuffers([], set()),
        gradients=Gradients([]) if torch.is_grad_enabled() else None,
        global_batch=LocalBatch(length),
        budgeted=True,
    )
    step.tight = True  # what stays behind is not asked about, but left whole
    inspect_model(step)
    sizes = step.traits.sizes
    shown = not (step.traits.doubts or step.traits.copies)
    return shown, length if sizes is None or sizes.counts else 0
