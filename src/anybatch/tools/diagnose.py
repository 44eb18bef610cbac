"""Diagnosis of a split model: questions that find why it differs from the undivided one.

Each test runs on a copy of the model and returns a name or a line of source: which module has other
outputs for half of the rows, where forward reads a value and may decide by it, whether it draws
random numbers, which buffers it moves. The copies and the report are also made here.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from anybatch.core import pytree
from anybatch.core.batch import TensorBatch
from anybatch.core.hooks import ATTRIBUTES
from anybatch.core.modules import call_model, keywords, walk
from anybatch.core.norm import NonReducingNorms, counters
from anybatch.core.plan import Printed
from anybatch.core.transaction import BufferState, note_buffers, same_values
from anybatch.errors import AnybatchError

READS = frozenset(["item", "__bool__", "__float__", "__int__", "__index__", "tolist", "nonzero"])


@dataclass(frozen=True)
class Split:
    """One way of splitting: the error of every tensor by name, or why it was refused."""

    micro_batch: int
    errors: dict[str, float]
    refused: str | None
    mechanism: str

    @property
    def worst(self) -> float:
        """The largest error; infinite where the split was refused."""
        return max(self.errors.values(), default=float("inf"))


@dataclass(frozen=True)
class Finding:
    """Something worth knowing: in words, and as the line to paste, where there is one."""

    text: str
    line: str | None = None


@dataclass(frozen=True, repr=False)
class Report(Printed):
    """Result of `check`: the verdict, the errors by split, and the findings.

    Attributes:
        exact: every split gives the gradient of the undivided batch, and that is finite.
        samples: size of the batch.
        dtype: the precision of the comparison.
        bound: the largest error that counts as exact.
        splits: one entry a micro-batch size.
        findings: differences and costs, each with its reason and a remedy.
    """

    exact: bool
    samples: int
    dtype: str
    bound: float
    splits: tuple[Split, ...]
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        verdict = "exact" if self.exact else "NOT exact"
        lines = [f"{verdict}: {self.samples} samples, {self.dtype}, bound {self.bound:.1e}"]
        refused: dict[str, list[str]] = {}
        for split in self.splits:
            if split.refused is not None:
                refused.setdefault(split.refused, []).append(str(split.micro_batch))
                continue
            name = max(split.errors, key=lambda key: split.errors[key])
            lines.append(
                f"  micro-batch {split.micro_batch:>4}  {split.mechanism:<10} "
                f"worst error {split.worst:.1e} ({name})"
            )
        for why, sizes in refused.items():
            lines.append(f"  micro-batch {', '.join(sizes):>4}  refused: {why}")
        for finding in self.findings:
            lines.append(f"  - {finding.text}")
            if finding.line:
                lines.append(f"      {finding.line}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        return json.dumps(asdict(self), indent=2)


def copied(model: nn.Module, loss_fn: Any) -> tuple[nn.Module, Any]:
    """Return copies of both; a loss function or a hook that reads the model reads the copy."""
    memo: dict[int, Any] = {}
    try:
        twin = copy.deepcopy(model, memo)
        for fn in (loss_fn, *getattr(loss_fn, "__dict__", {}).values()):
            if isinstance(fn, FunctionType):
                memo[id(fn)] = _rebound(fn, memo)
        copied_loss = copy.deepcopy(loss_fn, memo)
    except Exception as error:
        raise AnybatchError(
            f"a check needs a copy of the model and the loss, and copying failed: "
            f"{first_line(error)}. Check a model that has not run yet, or detach the tensors that "
            "forward leaves on its modules"
        ) from error
    for name, parameter in _hooked(model, loss_fn):  # torch copies parameters without their hooks
        try:
            _copy_hooks(parameter, memo)
        except Exception as error:
            raise AnybatchError(
                "a check needs a copy of the hooks on parameters with all that they write to, and "
                f"one on {name} cannot be copied: {first_line(error)}. Remove it for the check: a "
                "step fires it once, however the batch is split"
            ) from error
    return twin, copied_loss


def _hooked(model: nn.Module, loss_fn: Any) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that have hooks, of the model and of a loss that is a module."""
    every = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    named = [pair for module in every for pair in module.named_parameters()]
    return [
        (name, p)
        for name, p in named
        if any(getattr(p, attribute, None) for attribute in ATTRIBUTES)
    ]


def _copy_hooks(parameter: nn.Parameter, memo: dict[int, Any]) -> None:
    """Register copies of the hooks of a parameter on its copy, with all that they write to."""
    twin: Any = memo[id(parameter)]
    registers = twin.register_hook, twin.register_post_accumulate_grad_hook
    for attribute, register in zip(ATTRIBUTES, registers, strict=True):
        for hook in (getattr(parameter, attribute) or {}).values():
            register(_copied_hook(hook, memo))


def _copied_hook(hook: Any, memo: dict[int, Any]) -> Any:
    if id(hook) in memo:
        return memo[id(hook)]
    if isinstance(hook, partial):
        inner = _copied_hook(hook.func, memo)
        return partial(inner, *copy.deepcopy(hook.args, memo), **copy.deepcopy(hook.keywords, memo))
    if not isinstance(hook, FunctionType):
        return copy.deepcopy(hook, memo)
    for value in _read_by(hook):
        if not isinstance(value, ModuleType | type | FunctionType):
            copy.deepcopy(value, memo)
    twin = _rebound(hook, memo, always=True)
    twin.__defaults__ = copy.deepcopy(hook.__defaults__, memo)
    twin.__kwdefaults__ = copy.deepcopy(hook.__kwdefaults__, memo)
    return twin


def _rebound(fn: FunctionType, memo: dict[int, Any], *, always: bool = False) -> FunctionType:
    """Return `fn` bound to copies, where it or a function of its file reads a copied object.

    Args:
        fn: a function.
        memo: the copies, in the form of `copy.deepcopy`.
        always: return another function, whether or not `fn` reads replaced values. Default False.
    """

    def copy_of(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(memo.get(id(item), item) for item in value)
        if id(value) not in memo and _in_file_of(value, fn):
            return _rebound(value, memo)
        return memo.get(id(value), value)

    if not (always or _reads_copied(fn, memo, set())):
        return fn
    scope = dict(fn.__globals__)
    cells = tuple(CellType() for _ in fn.__closure__ or ())
    twin = FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, cells)
    twin.__kwdefaults__ = fn.__kwdefaults__
    memo[id(fn)] = twin  # a function may name itself
    scope |= {n: copy_of(scope[n]) for n in fn.__code__.co_names if n in scope}
    for new, old in zip(cells, fn.__closure__ or (), strict=True):
        if old != CellType():
            new.cell_contents = copy_of(old.cell_contents)
    return twin


def _reads_copied(fn: FunctionType, memo: dict[int, Any], visited: set[int]) -> bool:
    visited.add(id(fn))
    ahead = _read_by(fn)
    ahead += [item for value in ahead if type(value) in (list, tuple) for item in value]
    functions = (v for v in ahead if _in_file_of(v, fn) and id(v) not in visited)
    copied_too = any(id(value) in memo for value in ahead)
    return copied_too or any(_reads_copied(v, memo, visited) for v in functions)


def _read_by(fn: FunctionType) -> list[Any]:
    """Return the values of the global names and the cells of a function."""
    found = [fn.__globals__[n] for n in fn.__code__.co_names if n in fn.__globals__]
    return found + [c.cell_contents for c in fn.__closure__ or () if c != CellType()]


def _in_file_of(value: Any, fn: FunctionType) -> bool:
    """Return whether `value` is a function of the file of `fn`: a library reads no user's model."""
    return isinstance(value, FunctionType) and value.__globals__ is fn.__globals__


def cloned(values: Any, *, double: bool = False) -> Any:
    """Return a tree with tensors and arrays of its own, in float64 if `double`."""

    def clone(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        if not isinstance(leaf, Tensor):
            return leaf
        twin = leaf.detach().clone()
        twin = twin.double() if double and twin.is_floating_point() else twin
        return twin.requires_grad_(leaf.requires_grad)

    return pytree.map_leaves(clone, values)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def silence_dropout(model: nn.Module) -> list[str]:
    """Set every dropout probability in `model` to 0, and return the names of those that were not.

    Dropout draws other numbers for other splits, all equally right: there is nothing to compare.
    """
    names = []
    for name, module in model.named_modules():
        attribute = "p" if isinstance(module, _DropoutNd) else "dropout"
        value = getattr(module, attribute, 0)
        if isinstance(value, float) and value > 0:
            setattr(module, attribute, 0.0)
            names.append(name or type(module).__name__)
    return names


def draws(model: nn.Module, batch: TensorBatch) -> bool:
    """Say whether forward gives other outputs under another seed."""
    outputs = []
    with _same_buffers(model):
        for seed in (1, 2):
            torch.manual_seed(seed)
            outputs.append([t for _, t in pytree.tensors(call_model(model, batch.inputs))])
    first, second = outputs
    same = len(first) == len(second) and all(map(same_values, first, second))
    return not same


def first_meeting(model: nn.Module, batch: TensorBatch) -> str | None:
    """Return the first module that makes outputs of some rows depend on other rows, or None.

    BatchNorm does not count: micro-batches wait for each other there.
    """
    half, single = max(1, batch.size // 2), NonReducingNorms(counters(walk(model)))
    with _same_buffers(model), single:
        full = _outputs_by_module(model, batch.inputs)
    with _same_buffers(model), single:
        part = _outputs_by_module(model, pytree.rows(batch.inputs, 0, half, batch.size))
    for (name, all_rows), (other, some_rows) in zip(full, part, strict=False):
        if name != other:
            return f"{name} (another module ran for fewer rows: {other})"
        rows = all_rows.shape[:1] == (batch.size,) and some_rows.shape[:1] == (half,)
        if rows and not _alike(all_rows[:half], some_rows):
            return name
    return None


def value_reads(model: nn.Module, batch: TensorBatch) -> list[str]:
    """Return ``file:line`` of every place in forward that turns a tensor into a Python value."""
    reads = _Reads()
    with _same_buffers(model), reads:
        call_model(model, batch.inputs)
    return sorted(reads.places)


def moved_buffers(model: nn.Module, batch: TensorBatch) -> list[str]:
    """Return the names of the buffers that one forward pass changes."""
    with _same_buffers(model) as before:
        call_model(model, batch.inputs)
        return [state.path for state in before if state.moved()]


class _Reads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            frame = sys._getframe(1)
            while frame.f_back and "/torch/" in frame.f_code.co_filename:
                frame = frame.f_back
            self.places.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return func(*args, **keywords(func, kwargs))


def _outputs_by_module(model: nn.Module, inputs: Any) -> list[tuple[str, Tensor]]:
    """Run forward and return ``(module name, output tensor)`` in the order of completion."""
    found: list[tuple[str, Tensor]] = []
    handles = []
    for name, module in model.named_modules():

        def note(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            label = name or "the model's own forward"
            found.extend((label, t.detach().clone()) for _, t in pytree.tensors(output))

        handles.append(module.register_forward_hook(note))
    try:
        call_model(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return True  # sequence-first and its like: nothing to compare row by row
    if not a.is_floating_point():
        return torch.equal(a, b)
    bound = torch.finfo(a.dtype).eps ** 0.5 * (float(a.abs().max()) if a.numel() else 0.0)
    return torch.allclose(a, b, rtol=0.0, atol=bound, equal_nan=True)


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[list[BufferState]]:
    states = note_buffers(walk(model))
    try:
        yield states
    finally:
        for state in states:
            state.put_back()
