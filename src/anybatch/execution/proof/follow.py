"""Dispatch mode that follows samples through each kernel of a forward and, optionally, backward.

Real values are computed as usual; the masks are computed with them
(`anybatch.execution.proof.rules`). Recorded are the module and the kernel in which samples first
meet, numbers that Python reads of several samples, kernels that could not be followed, and the rows
that each call of batch normalisation holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from anybatch.core.modules import DispatchMode
from anybatch.core.norm import counters
from anybatch.core.rng import torch_state
from anybatch.execution.proof import kernel_call, notes, places, rules_places
from anybatch.execution.proof import masks as sets
from anybatch.execution.proof.kernel_call import Call
from anybatch.execution.proof.kernel_probe import CHOOSING, Few, ask
from anybatch.execution.proof.law import Paths
from anybatch.execution.proof.masks import CUT, Masks, fold, on_one_device, several, shrink, union
from anybatch.execution.proof.notes import (
    COUNTING,
    MaskedResult,
    Notes,
    norm_call,
    ours,
    smaller_copies,
)
from anybatch.execution.proof.places import FreeCall, Lengths, Made
from anybatch.execution.proof.rules import REDUCTIONS, has_rule, masks_after, reduced
from anybatch.execution.proof.rules_products import not_linear, sliced
from anybatch.memory.meter import tensors_in, written_by


class Follow(DispatchMode):
    """Follow samples in the body.

    Args:
        lengths: calls whose results are as long as there are samples. Default: none.
        samples: the sample that each row stands for.
        fewer: rows of the forward that has shown the lengths.
        guard: context of kernels. Default: none.

    Attributes:
        masks: of all tensors that samples have had a part in.
        backward: kernels belong to a backward pass.
        called: Python has called a function of torch, and kernels are its.
        checks: a number that is read is only checked.
        singles: numbers that are given to kernels of single numbers are noted, too. Default False:
            these are a loss inside a model, which is traced.
    """

    def __init__(
        self,
        model: nn.Module,
        masks: Masks,
        lengths: Lengths | None = None,
        samples: Sequence[int] = (),
        fewer: int = 0,
        guard: AbstractContextManager[Any] | None = None,
    ) -> None:
        super().__init__()
        self.masks, self.notes, self.backward = masks, Notes(), False
        self.called = self.singles = self.checks = self._packed = False
        self._lengths, self.samples, self._fewer = lengths or {}, samples, fewer
        self._calls, self._guard = 0, guard or nullcontext()
        self._around: tuple[Any, Any] | None = None
        self.paths, self._few = Paths(model), Few()
        self._alike: dict[int, StorageWeakRef] = {}
        self._fresh: set[int] = set()
        self._filled: dict[int, StorageWeakRef] = {}
        trained = model.parameters() if lengths else ()
        self._weights = [one for one in trained if one.requires_grad and places.in_rows(one)]
        self._parameters: set[int] | None = None
        self._rng = torch_state()
        norms = [
            (path, one) for path, one in model.named_modules() if getattr(one, "training", False)
        ]
        self._counters = {id(one) for one in counters(norms)}
        self.model = model

    @property
    def path(self) -> str:
        """The module that runs."""
        return self.paths.now()

    def seed(self, tensor: Tensor, samples: list[int]) -> None:
        """Say that the rows of a tensor are these samples."""
        bits = [1 << sample for sample in samples]
        rows = torch.tensor(bits, dtype=torch.uint8, device=tensor.device)
        self.masks.put(tensor, rows.reshape([-1] + [1] * (tensor.dim() - 1)))

    def record_norm(self, x: Tensor) -> None:
        """Take in a call of batch normalisation for training, of [n, C, ...]."""
        with _disable_current_modes():  # or what is done with masks would be followed
            self.notes.norms.append(norm_call(self.path, x, self.masks.of(x)))

    def has_samples(self, tensor: Tensor) -> bool:
        """Say whether a sample has had a part in a tensor, for code that runs under modes."""
        with _disable_current_modes():  # or what is done with masks would be followed
            return self.masks.of(tensor) is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel, and note the masks of its results.

        No mode intercepts the kernels of masks: a meter took twice as long for them as they do.
        Tensors with a dispatch of their own have no data for these kernels without it
        (test_indices_of_a_persons_own_type_are_computed_with).
        """
        self._around = None
        if types:
            return self._trace(func, args, kwargs or {})
        get = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
        self._around = get[0](), get[1]()
        with torch._C._DisableTorchDispatch():
            return self._trace(func, args, kwargs or {})

    def _under_modes(self) -> AbstractContextManager[Any]:
        """Return the context of kernels that the modes around this one intercept."""
        if self._around is None:
            return nullcontext()
        return torch._C._ForceDispatchKeyGuard(*self._around)

    def _trace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is None:  # control flow: its kernels come one by one, or not at all
            self.notes.where.setdefault(notes.OPERATOR, f"{self.path} ({func})")
            return self._run(func, args, kwargs)
        self.notes.sizes |= not self.called  # TorchScript and C++ read sizes where nobody hears it
        name = kernel_call.kernel(func).name
        self._calls += name != "detach"  # autograd calls it for what it saves
        operands = [*tensors_in((args, kwargs))]
        masks: dict[int, Tensor] = {}
        for one in operands:
            if (mask := self.masks.of(one)) is not None:
                masks[id(one)] = mask
        masks = on_one_device(masks) if len(masks) > 1 else masks
        call = Call(name, func, args, kwargs, operands, masks, self.backward)
        if self.singles or not operands or any(one.dim() for one in operands):
            self._note_numbers(call)
        self._note_counter(call)
        if name in kernel_call.NORMS and kernel_call.trains(schema, args) and not self.backward:
            return self._normalised(call)
        self.notes.sizes |= name == "roll"  # by 12 it leaves 4 rows, and 3, where they are
        if name == "randperm":
            self.notes.shuffles.append((self.path, int(args[0])))
        call.filled = {id(one) for one in operands if self._filled and self._is_filled(one)}
        call.alike = {id(one) for one in operands if self._fresh and self._is_fresh(one)}
        call.writes = list(written_by(func, args, kwargs))
        follows = masks or name == "_local_scalar_dense"
        result = self._followed(call) if follows else self._without(call)
        fills = name in places.FILLS or (call.filled and name in places.COPIES)
        if fills and places.in_rows(result):
            storage = result.untyped_storage()
            self._filled[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if self._few.sizes or name in CHOOSING:
            self._chosen(call, result)
        return result

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Take the kernels in the body, a function of packed sequences, for one kernel.

        Their number, and the places of their cuts, depend on the lengths of samples; each sample is
        computed the same with any others, which the masks show.
        """
        before, calls = self.notes, self._calls
        self.notes, self._packed = Notes(), True
        try:
            yield
        finally:
            inner, self.notes, self._calls, self._packed = self.notes, before, calls + 1, False
            for name in ("values", "unfollowed", "draws", "seeded", "backward"):
                getattr(before, name).extend(getattr(inner, name))
            if notes.OPERATOR in inner.where:
                before.where.setdefault(notes.OPERATOR, inner.where[notes.OPERATOR])

    def pads(self, sizes: Tensor) -> None:
        """Note that rows are padded to the longest of them."""
        with _disable_current_modes():  # or Python would read numbers of samples
            several = bool((sizes != sizes[0]).any())
        self.notes.longest.append((self.path, several))

    def padded(self, rows: Tensor, lengths: Tensor, dim: int) -> None:
        """Say that lengths [n], which no kernel has made, are those of rows padded.

        The rows are [n, T, ...] or [T, n, ...], and hold the samples along `dim`.
        """
        with _disable_current_modes():
            mask = self.masks.of(rows)
            if mask is not None:
                others = [d for d in range(mask.dim()) if d != dim]
                self.masks.put(lengths, fold(mask, others, keep=False).to(lengths.device))

    def _followed(self, call: Call) -> Any:
        self._inspect_operands(call)
        if call.name == "_local_scalar_dense":
            return self._read(call.func, call.args)
        views = kernel_call.kernel(call.func).views
        before = self._before(call, views=views)
        result = self._run(call.func, call.args, call.kwargs)
        kernel_call.take_in(call, result)
        self.notes.sizes |= views and kernel_call.may_cut(call)
        self.notes.cuts |= views and call.name == "slice" and kernel_call.may_cut(call)
        if views and not call.writes:
            self._viewed(call)
        elif call.name not in kernel_call.VIEWS_IN_PLACE:  # the masks of a storage are known
            self._made(call, before)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel of the model under the guard; operations on masks run outside of it."""
        draws = not self.backward and hasattr(func, "_schema") and kernel_call.kernel(func).draws
        if draws and not all(map(torch.equal, self._rng, torch_state())):
            self.notes.seeded.append(self.path)
        with self._under_modes(), self._guard:
            result = func(*args, **kwargs)
        if draws:
            self._rng = torch_state()
            made = [*tensors_in(result)]
            name = kernel_call.kernel(func).name
            self.notes.draws.append((self.path, name, places.shapes(made)))
        return result

    def _read(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Read a number, and note it for a forward on tensors without data."""
        number = self._run(func, args, {})
        if not self.backward:
            self.notes.values.append(number)
        return number

    def _chosen(self, call: Call, result: Any) -> None:
        kernel_call.take_in(call, result)
        every = (*call.operands, *call.results)
        if self.backward or any(one.layout != torch.strided for one in every):
            return
        if call.name in CHOOSING and call.masks:
            self._few.chose(call, self.masks.of(call.results[0]))
        elif self._few.sizes:
            self._few.ran(call, self.path)
            self.notes.few = self._few.places
            none = 0 in self._few.sizes and not all(one.numel() for one in call.operands)
            if none and call.name in rules_places.PUTS | rules_places.WRITES:
                self._wrote_none(call)

    def _wrote_none(self, call: Call) -> None:
        """Take in that no row has chosen where to write: each might have written to its own."""
        target, n = [*call.results, *call.written][0], len(self.samples)
        if call.mask(target) is not None or not target.dim() or self.masks.of(target) is not None:
            return
        if not target.shape[0] or target.shape[0] % n:
            self._few.places.append(f"{self.path}, in {call.name}")
            return
        with _disable_current_modes():
            self.seed(target, [one for one in self.samples for _ in range(target.shape[0] // n)])

    def _doubt(self, words: str, name: str) -> None:
        self.notes.where.setdefault(words, f"{self.path}, in {name}")

    def _note_counter(self, call: Call) -> None:
        """Record a use of the counter of a batch normalisation, which one lane moves first.

        Batch normalisation itself adds to it, and takes its momentum from it.
        """
        found = [id(one) in self._counters for one in call.operands] if self._counters else []
        own = call.name == "add_" and not any(found[1:])
        if any(found) and not own and not ours(COUNTING):
            self._doubt(notes.COUNTER, call.name)

    def _note_numbers(self, call: Call) -> None:
        if not self.backward and (numbers := places.scalars(call.func, call.args, call.kwargs)):
            self.notes.numbers.append((self.path, call.name, numbers))

    def _without(self, call: Call) -> Any:
        """Run a kernel in which no sample has a part; written tensors then hold no sample."""
        name, func, operands = call.name, call.func, call.operands
        result = self._run(func, call.args, call.kwargs)
        counts = [one.numel() for one in operands if all(one is not w for w in call.writes)]
        for one in call.writes if name != "set_" else ():
            self.masks.write(one, None)
            if any(counts) or not counts:  # an expert without rows writes none
                self._filled.pop(one.untyped_storage()._cdata, None)
        if self.backward:
            return result
        kernel_call.take_in(call, result)
        self._note_single(call)
        if name == "select":  # an entry of a table
            self.notes.numbers.append((self.path, name, call.args[1:]))
        views = [one for one in call.writes if places.plain(one)]
        if name in places.CONSTANT and not views:
            return result
        took = places.shapes([*operands, *places.bases(views)])
        now = Made(name, places.shapes(call.results), took)
        if name not in places.CONSTANT and operands:
            made = smaller_copies(call.results, operands)
            now = now._replace(made=made, first=places.firsts(func, call.results))
        self.notes.made[self._calls] = now
        fewer = self._lengths.get(self._calls)
        if fewer is not None and (fewer.name != name or len(fewer.took) != len(now.took)):
            self._doubt(notes.COUNTED, call.name)  # nobody knows which it was
        elif fewer is not None:
            free = FreeCall(call, views, fewer, self._trained)
            with _disable_current_modes():
                self._mark(call, free, fewer)
        return result

    def _mark(self, call: Call, free: FreeCall, fewer: Made) -> None:
        self.notes.sizes |= free.cuts
        rows = free.rows()
        fixed = rules_places.at_fixed_places(rows, square=True)
        if (fixed and not rules_places.takes_no_place(rows)) or free.writes_some():
            self._doubt(notes.FIXED, call.name)
        if call.name in places.CONSTANT:
            return
        name, note = call.name, self.masks.write if call.writes else self.masks.put
        longer = name == "lift_fresh" and call.results[0].shape != torch.Size(fewer.gave[0])
        self.notes.made_by_python |= longer
        for at, (one, _) in enumerate(zip(call.results, fewer.gave, strict=False)):
            found = free.marks(at, self.samples, self._fewer)
            if found is not None:
                note(one, found, lambda: f"{self.path}, in {name}")
            elif free.counts(at) and not ours():
                self._doubt(notes.COUNTED, call.name)
            elif places.plain(one) and not free.outside:
                storage = one.untyped_storage()
                self._alike[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                if not kernel_call.kernel(call.func).aliases:
                    self._fresh.add(storage._cdata)  # no table, which may be another one later

    def alike(self, tensor: Tensor) -> bool:
        """Say whether a tensor was made without samples, and is equal for all rows."""
        record = self._alike.get(tensor.untyped_storage()._cdata) if places.plain(tensor) else None
        if record is None or record.expired():  # type: ignore[no-untyped-call]
            return False
        return self.masks.of(tensor) is None

    def _is_fresh(self, tensor: Tensor) -> bool:
        """Say whether forward itself has made a tensor that is alike."""
        return self.alike(tensor) and tensor.untyped_storage()._cdata in self._fresh

    def _is_filled(self, tensor: Tensor) -> bool:
        """Say whether a tensor is of one number that forward gave, wherever it is read."""
        if type(tensor) not in places.PLAIN or tensor.layout != torch.strided:
            return False
        record = self._filled.get(tensor.untyped_storage()._cdata)
        if record is None or record.expired():  # type: ignore[no-untyped-call]
            return False
        return places.in_rows(tensor)

    def _trained(self, tensor: Tensor) -> bool:
        """Return whether a tensor may change later: it requires gradients or is a weight."""
        if self._parameters is None:  # not before: in a kernel nobody hears that it is asked for
            self._parameters = {one.untyped_storage()._cdata for one in self._weights}
        return tensor.requires_grad or tensor.untyped_storage()._cdata in self._parameters

    def _note_single(self, call: Call) -> None:
        """Note the value of a single number that was made of no sample: it may be their count."""
        drawn = kernel_call.kernel(call.func).draws or "empty" in call.name
        for one in call.results:
            single = one.dim() == 0 and places.plain(one) and not (drawn or one.requires_grad)
            if single and not ours():
                with _disable_current_modes(), suppress(RuntimeError):  # one that traces has none
                    self.notes.numbers.append((self.path, call.name, (one.item(),)))

    def _inspect_operands(self, call: Call) -> None:
        if call.name in kernel_call.READS:
            # Of a comparison of tensors Python gets a flag, whatever they hold
            # (test_numbers_that_python_reads_are_a_doubt).
            if call.masks and not (self.checks or ours()):
                real = call.name == "_local_scalar_dense" and call.operands[0].is_floating_point()
                self.notes.read.append((self.path, "number" if real else "count"))
        elif call.name in kernel_call.TABLES and call.argument("scale_grad_by_freq"):
            self.notes.frequencies.append(self.path)
        elif call.name in kernel_call.LOSSES and not self.notes.lost and not self.backward:
            first = call.args[0]
            if several(call.mask(first)):
                self.notes.lost = self.masks.origin(first) or self.path
        if call.name in REDUCTIONS:
            self._note_part(call)
        if self.backward and call.name not in kernel_call.READS:
            self.notes.backward += not_linear(call)
        elif not self.backward:
            self._note_places(call)

    def _note_places(self, call: Call) -> None:
        """Note rows that are read or written by their place, or where samples choose it."""
        if rules_places.collides(call):
            self._doubt(notes.COLLISION, call.name)
        if self._lengths and rules_places.by_position(call, len(self.samples)):
            self._doubt(notes.POSITION, call.name)
        none = 0 in self._few.sizes and rules_places.takes_no_place(call)
        if rules_places.at_fixed_places(call) and not none:
            self._doubt(notes.FIXED, call.name)

    def fills_diagonal(self, tensor: Tensor) -> None:
        """Take in a call that writes to a diagonal, which kernels see as a stride."""
        with _disable_current_modes():
            mask = self.masks.of(tensor)
            dims = (0, 1) if tensor.dim() > 1 else ()
            if mask is not None and any(kernel_call.varies(mask, d) for d in dims):
                self._doubt(notes.FIXED, "fill_diagonal_")

    def _before(self, call: Call, *, views: bool) -> Any:
        """Return the arguments as they are before the call, for a kernel that is rerun later."""
        if views or has_rule(call.name, call.func):
            return call.args, call.kwargs
        ids = {id(one) for one in call.writes}
        with self._under_modes():
            return tree_map(lambda a: a.clone() if id(a) in ids else a, (call.args, call.kwargs))

    def _made(self, call: Call, before: Any) -> None:
        tensors = (*call.results, *call.operands)
        if any(one.layout != torch.strided or one.is_nested for one in tensors):
            self.notes.unfollowed.append((self.path, call.name, "no dense tensor"))
            return
        found = masks_after(call)
        self.notes.mixes_orders |= call.mixes_orders
        if found is None:

            def unfollowed(error: str) -> None:
                self.notes.unfollowed.append((self.path, call.name, error))

            with self._under_modes():
                found = list(ask(call, before, unfollowed))
            if call.written:
                unfollowed("it writes to what it does not return")
        if not self.backward and call.name in places.CONSTANT:
            self._note_single(call)
        place = partial(self._origin, call)
        results = [*call.results, *call.written]
        note = self.masks.write if call.writes else self.masks.put
        every = call.all() if len(found) < len(results) else None
        for one, mask in zip_longest(results, found[: len(results)], fillvalue=every):
            assert one is not None
            note(one, self._with_cut(call, one, kernel_call.fitting(mask, one)), place)
            self._note_lines(call, one, mask)

    def _with_cut(self, call: Call, tensor: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the mask of a tensor after a write; rows that a position has chosen remain cut."""
        if self.backward or not kernel_call.remains_cut(call, tensor):
            return mask
        self.notes.cuts = True
        cut = torch.full([1] * tensor.dim(), CUT, dtype=torch.uint8, device=tensor.device)
        return cut if mask is None else mask | cut

    def _note_lines(self, call: Call, tensor: Tensor, mask: Tensor | None) -> None:
        """Record the dimensions of a result, and those along which samples lie."""
        if self.backward or mask is None or tensor.dim() < 2:
            return
        if not (places.in_rows(mask) and places.in_rows(tensor)):
            return
        lies = {d for d, size in enumerate(mask.shape) if size > 1 and mask.stride(d)}
        if call.name in kernel_call.SPREADS:
            mask = shrink(mask)  # spread over all elements it would take the memory of its tensor
            lies = {d for d in lies if mask.shape[d] > 1 and kernel_call.varies(mask, d)}
        line = MaskedResult(self.path, call.name, tuple(tensor.shape), frozenset(lies))
        self.notes.lines.setdefault(self._calls, line)

    def _origin(self, call: Call) -> str:
        """Return where samples meet: the recorded place of an operand, or this call."""
        for one in call.operands:
            if several(call.mask(one)) and (place := self.masks.origin(one)):
                return place
        return f"{self.path}, in {call.name}"

    def _viewed(self, call: Call) -> None:
        x = next(tensors_in(call.args), None)
        mask = call.mask(x)
        if x is None or mask is None:
            return
        found = kernel_call.views_of(call, mask, x)
        if found is None:
            return
        masks, chosen = (found, "") if self._packed else sliced(call, found)
        for one, view in zip(call.results, masks, strict=False):
            self.masks.join(one, view)
            self._note_lines(call, one, view)
            if chosen:
                self.masks.taint(one, f"{self.path}, in {chosen}")

    def _normalised(self, call: Call) -> Any:
        """Run batch normalisation that is local by request, or that normalises each row by itself.

        With batchnorm="local" each micro-batch is normalised by itself. One row of n x C channels
        is each sample by itself (instance_norm).
        """
        result, x = self._run(call.func, call.args, call.kwargs), call.args[0]
        mask = call.mask(x)
        self.notes.local |= x.shape[0] != 1
        if mask is not None:
            folded = fold(mask, range(2, mask.dim())) if x.shape[0] == 1 else mask
            weights = [
                own.reshape([1, -1] + [1] * (x.dim() - 2))
                for one in call.args[1:3]
                if (own := call.mask(one)) is not None
            ]
            self.masks.put(
                result[0], union([mask, folded, *weights]), partial(self.masks.origin, x)
            )
            if x.shape[0] == 1:
                for one in result[1:3]:
                    rows = fold(mask, range(2, mask.dim()), keep=False)
                    self.masks.put(one, rows.reshape(-1) if one.numel() else None)
        return result

    def _note_part(self, call: Call) -> None:
        """Record a reduction over one sample here: in a larger batch it may be over several.

        A batch that is cut in two halves has halves of one sample where it has two.
        """
        x = call.args[0]
        mask = call.mask(x)
        if self.backward or mask is None or not sets.has(mask, CUT):
            return
        dims = reduced(call)
        if any(x.shape[d] == 1 for d in dims):
            self._doubt(notes.PART, call.name)
