"""Comparison of the full batch's forward with that of a micro-batch, on fake tensors.

A few rows do not show how a model computes more of them: a branch on ``len(x)``, ghost batches of a
fixed size, a factor that is the number of samples. Without data the full batch costs no memory, and
the same functions must be called with the same numbers for it and for a micro-batch.

    48 samples   linear  batch_norm [48]   mul 0.5    relu
    12 samples   linear  batch_norm [12]   mul 0.5    relu      congruent
    12 samples   linear  batch_norm [12]   mul 2.0              another number, another function
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from anybatch.core.barrier import Site, samples_here
from anybatch.core.modules import DispatchMode, keywords, walk
from anybatch.core.norm import NonReducingNorms, counters
from anybatch.core.python_state import PythonState
from anybatch.core.rng import RNGState
from anybatch.execution.proof.kernel_call import kernel
from anybatch.execution.proof.law import CUTS, Called, Paths, breaks, called
from anybatch.execution.proof.places import FreeTensors, scalars
from anybatch.execution.proof.verdict import UNDIVIDED, Verdict, first_difference, other_rows
from anybatch.memory.fakes import Fakes, forget_fakes, interrupted_between_functions, unreported
from anybatch.memory.meter import DEVICE, kernel_name, tensors_in

QUERIES = frozenset(
    "__get__ size dim numel stride is_contiguous __len__ __bool__ __hash__ __repr__ contiguous "
    "view reshape expand expand_as view_as clone to type float double half bfloat16 "
    "requires_grad_ is_floating_point is_complex __getitem__ unbind __iter__ element_size "
    "__set__ data_ptr nelement ndimension get_device is_pinned storage_offset __format__".split()
)
"""Functions that compute nothing, or whose way through depends on how rows lie in memory."""

PROPERTIES: dict[Any, str] = {
    getattr(Tensor, name).__get__: name for name in "T mT H mH data real imag".split()
}
"""Properties that give other numbers, or cut the graph."""

CASTS = frozenset("to type type_as float double half bfloat16".split())
"""Functions that compute something where they give another type: they round, or cut off."""

PLACED = frozenset("view reshape _unsafe_view clone copy_ detach alias expand empty_like".split())
"""Kernels that compute nothing, and are called or not by how a tensor lies in memory."""

Kernel = tuple[str, str, tuple[Any, ...], tuple[int, ...]]
"""Module, kernel, the dimensions among its arguments, and how many its tensors have."""


@dataclass
class CallTrace:
    """Record of the calls of a forward.

    Attributes:
        functions: (module, function), in order.
        lists: (module, lists of places that rows or features are read or written at), in order.
        numbers: (module, kernel, numbers) of pointwise kernels, in order.
        kernels: (module, kernel, dimensions among its arguments, dimensions of its tensors).
        norms: (module, values of a channel) of calls of batch normalisation.
        by_row: of each call of batch normalisation: it normalises rows by themselves, or a weight.
        calls: of functions that compute something, in order.
        cuts: of kernels that cut something off, in order.
        made: tensors without data that were made.
        outside: tensors that were no result of a call, by their word in `calls`.
        error: why the forward could not be traced; "" where it was.
    """

    functions: list[tuple[str, str]] = field(default_factory=list)
    lists: list[tuple[str, str]] = field(default_factory=list)
    numbers: list[tuple[str, str, tuple[Any, ...]]] = field(default_factory=list)
    kernels: set[Kernel] = field(default_factory=set)
    norms: list[tuple[str, int]] = field(default_factory=list)
    by_row: list[bool] = field(default_factory=list)
    calls: list[Called] = field(default_factory=list)
    cuts: list[Called] = field(default_factory=list)
    made: list[weakref.ref[Tensor]] = field(default_factory=list)
    outside: dict[str, weakref.ref[Tensor]] = field(default_factory=dict)
    error: str = ""

    def end(self) -> None:
        """Remove the words of freed tensors from the calls: no record shows how these were made.

        Tensors that persist are the model's, or outside of it: which of two such tensors is used
        may depend on the number of samples.
        """
        gone = {word for word, tensor in self.outside.items() if tensor() is None}
        if gone:
            self.calls = [
                one._replace(words=[word for word in one.words if word not in gone])
                for one in self.calls
            ]


Traces = dict[int, CallTrace]
"""Number of samples -> the trace of their forward."""

Full = tuple[CallTrace, int]
"""The trace of the full batch, and its samples."""


def _of_all() -> bool:
    """Return whether the running code has the rows of the full batch, and so may count them."""
    return samples_here() == -1


class _Functions(TorchFunctionMode):
    def __init__(
        self, record: CallTrace, path: Callable[[], str], names: Mapping[int, str], rows: int
    ) -> None:
        super().__init__()
        self._trace, self._path, self._names = record, path, names
        self._free = FreeTensors(names, rows)
        self._made: dict[int, weakref.ref[Tensor]] = {}
        self.backward = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = keywords(func, kwargs)
        name, arguments = getattr(func, "__name__", ""), (args, kwargs)
        name = PROPERTIES.get(func, name) if name == "__get__" else name
        inner = "." in name  # of tensors without data, or of autograd: nobody wrote it
        traces = not inner and (self.backward or not _of_all())
        compares = traces and name not in QUERIES
        path = self._path() if compares else ""
        if traces and name in INDEXING and (lists := _lists(args[1])):
            self._trace.lists.append((self._path(), repr(lists)))
        if compares:
            self._trace.functions.append((path, name))
        with torch._C.DisableTorchFunction():  # the modes around need not hear these questions
            free = self._free.takes(name, arguments)
            places = free and self._free.numbers(arguments)
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            casts = name in CASTS and isinstance(args[0], Tensor) and isinstance(result, Tensor)
            if traces and casts and args[0].dtype != result.dtype:
                self._trace.functions.append((self._path(), f"{name}() of another type"))
            self._free.gave(name, arguments, result, free=free)
            if compares:
                names = self._names, self._outside
                one = called(path, name, arguments, result, *names, free=free, places=places)
                self._trace.calls.append(one)
            self.knows(result)
        return result

    def knows(self, tensors: Any) -> None:
        """Take in tensors that were made for this forward."""
        for one in tensors_in(tensors):
            self._made[id(one)] = weakref.ref(one)

    def _outside(self, one: Tensor) -> str:
        """Return a word for a tensor that no call has made; "" for another."""
        made = self._made.get(id(one))
        if made is not None and made() is one:
            return ""
        word = f"{OUTSIDE}{id(one)}"
        self._trace.outside[word] = weakref.ref(one)
        return word

    def follows(self, tensors: Iterable[Tensor]) -> None:
        """Take these for tensors that samples have a part in."""
        for one in tensors:
            self._free.forget(one)


OUTSIDE = "tensor "
"""How the word begins of a tensor that is no result of a call, and has no name."""


def _comparable(a: Called, b: Called) -> tuple[Called, Called]:
    """Return two calls without the words of outside tensors where only one takes a stored tensor.

    The other one has made it, which its calls show.
    """
    words = [[word for word in one.words if word.startswith(OUTSIDE)] for one in (a, b)]
    if len(words[0]) == len(words[1]):
        return a, b
    found = [
        one._replace(words=[w for w in one.words if w not in words[0] + words[1]]) for one in (a, b)
    ]
    return found[0], found[1]


INDEXING = frozenset(("__getitem__", "__setitem__"))


def _lists(index: Any) -> list[Any]:
    """Return the lists of an index that hold no tensors: fake tensors have no values to compare."""
    lists = [one for one in (index if isinstance(index, tuple) else (index,)) if type(one) is list]
    return [one for one in lists if not any(True for _ in tensors_in(one))]


class _Numbers(DispatchMode):
    def __init__(
        self, record: CallTrace, path: Callable[[], str], values: Iterator[Any], *, singles: bool
    ) -> None:
        super().__init__()
        self._trace, self._path, self._values = record, path, values
        self._singles = singles
        self.backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # a question, and no kernel
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.name == "aten::_local_scalar_dense":
            value = next(self._values, None)
            if value is not None:
                return value
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._trace.made += map(weakref.ref, tensors_in(result))
        name = kernel(func).name if hasattr(func, "_schema") else ""
        if not name or (name not in CUTS if self.backward else _of_all()):
            return
        path = self._path()
        if name in CUTS:
            self._trace.cuts.append(called(path, name, (args, kwargs), result, {}))
        if self.backward:
            return
        # A 0-dim tensor is a loss inside the model, whose numbers are traced
        # (test_what_is_honest_is_exact_and_shown).
        real = isinstance(result, Tensor) and result.is_floating_point()
        if real and (result.dim() > 0 or self._singles):
            self._trace.numbers.append((path, name, scalars(func, args, kwargs)))
        if name not in PLACED:
            ndims = tuple(one.dim() for one in args if isinstance(one, Tensor))
            self._trace.kernels.add((path, kernel_name(func), _dimensions(func, args), ndims))


def _dimensions(func: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the dimensions among the arguments of a kernel; of an index its places."""
    found: list[Any] = []
    for at in _places_of_dimensions(func):
        for one in args[at : at + 1]:
            listed = isinstance(one, list | tuple)
            found += [isinstance(x, Tensor) or x for x in one] if listed else [one]
    return tuple(found)


@lru_cache(maxsize=1000)
def _places_of_dimensions(func: Any) -> tuple[int, ...]:
    return tuple(
        at
        for at, one in enumerate(func._schema.arguments)
        if one.name.startswith("dim") or one.name == "indices"
    )


class _Norms(NonReducingNorms):
    """BatchNorm mode that classifies a single row by the same call of the full batch."""

    def __init__(
        self,
        counters: Iterable[Tensor],
        watch: _NormRecorder,
        full: CallTrace,
        record: CallTrace,
        rows: int,
    ) -> None:
        super().__init__(counters, watch, rows=rows)
        self._full, self._trace = full, record

    def by_itself(self, x: Tensor) -> bool:
        """Say so, and note it."""
        found, at = super().by_itself(x), len(self._trace.by_row)
        if x.shape[0] == 1 and self._trace is not self._full:
            found = found or self._full.by_row[at : at + 1] == [True]
        self._trace.by_row.append(found)
        return found


class _NormRecorder:
    def __init__(self, record: CallTrace, path: Callable[[], str]) -> None:
        self._trace, self._path = record, path

    def record_input(self, x: Tensor) -> None:
        """Record a normalisation: its module, and the number of values of a channel."""
        self._trace.norms.append((self._path(), x.numel() // max(x.shape[1], 1)))

    def record_site(self, site: Site) -> None:
        """Nothing is to be done there."""


def sizes_of(samples: int, micro_batch: int, followed: int = 0) -> list[int]:
    """Return the sizes of the full batch and of its micro-batches, except those of one sample.

    Kernels of one row lie in memory in other ways, and take other ways through. The result for the
    rows that were `followed` holds for more if those compute the same.
    """
    parts = {max(micro_batch, 2), samples % micro_batch, followed}
    return [samples, *(n for n in parts if 2 <= n < samples)]


@dataclass(frozen=True)
class Comparison:
    """Comparison of a model's forwards for several numbers of samples.

    Attributes:
        rows: inputs of some rows, and how many.
        run: ``run(model, inputs, samples)`` calls it, and returns its outputs.
        values: Python's reads of tensors in a forward, in order. Default: unknown.
        singles: compare numbers that are computed with a number by itself, too. Default False.
        backward: compare the calls of custom hooks and functions in backward. Default False.
        traces: number of samples -> its trace of an earlier comparison that found no difference; so
            only others are traced, and all of them where these differ. The first and the last size
            are added, or the first one if it cannot be traced, and is not tried again. Default:
            none is stored.
        kernels: receives those of the full batch.
    """

    model: nn.Module
    rows: tuple[Any, int]
    run: Callable[[nn.Module, Any, int], Any]
    trains: bool
    values: Sequence[Any] = ()
    singles: bool = False
    backward: bool = False
    traces: Traces = field(default_factory=dict)
    kernels: set[Kernel] = field(default_factory=set)

    def __call__(self, sizes: Sequence[int], earlier: int | None = None) -> Verdict:
        """Compare the forwards of these sizes, the first of which is the full batch.

        A call of so many samples as `earlier` says comes before each, and may keep something; 0 is
        as many. Default None: no call does.
        """
        failed = self.traces.get(sizes[0])
        if failed is not None and failed.error:
            return _untraced(sizes[0], failed.error)
        stored = self.traces if earlier is None else {}
        if stored:
            record, said = self._recorded(sizes, earlier, stored)
            if not said and _differs(record, sizes) == Verdict():
                self.kernels.update(record[0].kernels)
                return Verdict()
            stored.clear()
        record, said = self._recorded(sizes, earlier, {})
        if said:
            if record[0].error:
                stored[sizes[0]] = CallTrace(error=said)
            return _untraced(sizes[0], said)
        self.kernels.update(record[0].kernels)
        found = _differs(record, sizes)
        if found.doubts and any(call.free and call.places for call in record[0].calls):
            found = _without_chance(record, sizes, *self._recorded([UNLIKE], earlier, {}))
        if found == Verdict():
            stored |= {sizes[at]: replace(record[at], made=[], outside={}) for at in (0, -1)}
        return found

    def error(self, size: int) -> str:
        """Return the error of a forward of so many samples; "" where it has none."""
        return self._recorded([size], None, {})[1]

    def _recorded(
        self, sizes: Sequence[int], earlier: int | None, there: Traces
    ) -> tuple[list[CallTrace], str]:
        """Trace the sizes that are not there, outside of all modes; return all, and the error."""
        record = [there.get(size) or CallTrace() for size in sizes]
        with (
            _disable_current_modes(),  # or a meter would count what has no data
            interrupted_between_functions(),
        ):
            said = self._traced(sizes, earlier, record, there)
        if any(one() is not None for each in record for one in each.made):
            forget_fakes()  # a walk over all objects, so only where something has kept one
        return record, said

    def _traced(
        self, sizes: Sequence[int], earlier: int | None, record: list[CallTrace], there: Traces
    ) -> str:
        rng, saved, each = RNGState.now(), PythonState(), record[0]
        try:
            fakes = Fakes()
            twin = fakes.copy(self.model, [module for _, module in walk(self.model)])
            saved.modules(twin.modules(), attributes=True)
            new = [pair for pair in zip(sizes, record, strict=True) if pair[0] not in there]
            for size, each in new:
                saved.put_back()  # or numbers that it counts would differ
                calls = [] if earlier is None else [(earlier or size, CallTrace())]
                for count, noted in (*calls, (size, each)):
                    rng.put_back()  # or those that Python draws
                    self.trace(fakes, twin, count, noted, (record[0], sizes[0]))
            saved.put_back()
            for _, each in new:
                each.end()
        except Exception as error:  # whatever a model does with data that is not there
            each.error = f"{type(error).__name__}: {error}".split("\n")[0]
        finally:
            saved.put_back()  # or a fake would stay in what the model shares with its copy
        return each.error

    def trace(
        self, fakes: Fakes, model: nn.Module, size: int, record: CallTrace, full: Full
    ) -> None:
        """Run a copy of the model on fake tensors of `size` rows, and record its calls."""
        paths, inputs = Paths(model), fakes.rows(*self.rows, size)
        norms = _Norms(
            counters(walk(model)), _NormRecorder(record, paths.now), full[0], record, full[1]
        )
        named = [*model.named_parameters(), *model.named_buffers()]
        names = {id(tensor): name for name, tensor in named}
        functions = _Functions(record, paths.now, names, size)
        numbers = _Numbers(record, paths.now, iter(self.values), singles=self.singles)
        functions.knows(tree_leaves(inputs))
        model.zero_grad(set_to_none=True)  # of the size before: to be added to is another call
        graph = torch.set_grad_enabled(self.trains)
        with graph, unreported(), fakes.mode, norms, functions, numbers:
            outputs = self.run(model, inputs, size)
            if self.backward:
                numbers.backward = functions.backward = True
                ends = [
                    t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad
                ]
                starts = [torch.ones_like(end) for end in ends]
                functions.follows(starts)
                if ends:  # inside of autograd.backward() no mode would hear what is called
                    _engine_run_backward(
                        tuple(ends), tuple(starts), False, False, (),
                        allow_unreachable=True, accumulate_grad=True,
                    )  # fmt: skip


def _untraced(size: int, error: str) -> Verdict:
    why = f"forward of {size} samples could not be traced without data ({error[:80]})"
    return Verdict("", (why,))


def _without_chance(
    record: list[CallTrace], sizes: Sequence[int], unlike: list[CallTrace], said: str
) -> Verdict:
    """Compare with only those places of the full batch that another number of samples has, too."""
    full, (other,) = record[0], unlike
    if not said and other.functions == full.functions:
        pairs = zip(full.calls, other.calls, strict=False)
        full.calls = [a._replace(places=a.places and b.places) for a, b in pairs]
    return _differs(record, sizes)


UNLIKE = 61
"""Samples by which few sizes of images can be divided, which might be taken for rows."""


def _differs(record: Sequence[CallTrace], sizes: Sequence[int]) -> Verdict:
    """Return the verdict on the first micro-batch that differs, or the doubts of all."""
    full, *others = record
    doubts: tuple[str, ...] = ()
    for size, part in zip(sizes[1:], others, strict=True):
        found = _differ(full, part, sizes[0], size)
        if found.meets:
            return found
        doubts += found.doubts
    return Verdict("", tuple(dict.fromkeys(doubts)))


def _differ(full: CallTrace, part: CallTrace, n: int, m: int) -> Verdict:
    if len(full.norms) != len(part.norms):
        path = (full.norms or part.norms)[0][0]
        counts = f"{len(full.norms)} calls for {n} samples and {len(part.norms)} for {m}"
        return Verdict(other_rows(path, counts))
    for (path, a), (other, b) in zip(full.norms, part.norms, strict=True):
        if path != other or a * m != b * n:
            counts = f"{a} values of a channel for {n} samples and {b} for {m}"
            return Verdict(other_rows(path, counts))
    if set(full.functions) != set(part.functions):
        some = set(full.functions) ^ set(part.functions)
        path, name = next(one for one in (*full.functions, *part.functions) if one in some)
        here = n if (path, name) in set(full.functions) else m
        return Verdict(
            "forward must compute the same for any number of samples when the batch is split, and "
            f"{path} calls {name} for {here} samples and not for {m if here == n else n}: a "
            f"branch on the number of samples. Take it out, or {UNDIVIDED}"
        )
    if full.functions != part.functions:
        why = f"forward calls other functions for {n} samples than for {m}"
        return Verdict("", (why,))
    if full.lists != part.lists:
        why = f"forward indexes with other lists for {n} samples than for {m}"
        return Verdict("", (why,))
    found = first_difference(full.numbers, part.numbers)
    if found is not None:
        return Verdict(
            "forward must compute the same for any number of samples when the batch is split, and "
            f"{found.where} {found.mine} for {n} samples and with {found.its} for {m}: a number "
            f"that depends on how many there are. Compute with it in the loss, or {UNDIVIDED}"
        )
    return Verdict("", tuple(_broken(full, part, n, m)))


def _broken(full: CallTrace, part: CallTrace, n: int, m: int) -> Iterator[str]:
    """Yield the first call, and the first cut, that breaks the rule of sizes."""
    for ours, theirs in ((full.calls, part.calls), (full.cuts, part.cuts)):
        pairs = zip(ours, theirs, strict=False)
        broken = next((a for a, b in pairs if breaks(*_comparable(a, b), n, m)), None)
        if broken is not None:
            yield f"{broken.name} in {broken.path} is not for {n} samples what it is for {m}"
        elif len(ours) != len(theirs):
            yield f"forward slices otherwise for {n} samples than for {m}"
