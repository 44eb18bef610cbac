"""Why a split model is not the undivided one: what to look for, and where it is.

Each question is asked of a copy of the model and answered with a name or a line of source: which
module gives other outputs for half of the rows, where forward reads a value and may decide by it,
whether it draws random numbers, which buffers it moves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from anybatch import tree
from anybatch.batch import TensorBatch
from anybatch.step import call_model

READS = frozenset(["item", "__bool__", "__float__", "__int__", "__index__", "tolist", "nonzero"])


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
    with torch.no_grad(), _same_buffers(model):
        for seed in (1, 2):
            torch.manual_seed(seed)
            outputs.append([t for _, t in tree.tensors(call_model(model, batch.inputs))])
    return any(not torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def first_meeting(model: nn.Module, batch: TensorBatch) -> str | None:
    """Return the first module whose outputs for some rows depend on the other rows, or None."""
    half = max(1, batch.size // 2)
    with torch.no_grad(), _same_buffers(model):
        whole = _outputs_by_module(model, batch.inputs)
    with torch.no_grad(), _same_buffers(model):
        part = _outputs_by_module(model, tree.rows(batch.inputs, 0, half))
    for (name, all_rows), (other, some_rows) in zip(whole, part, strict=False):
        if name != other:
            return f"{name} (another module ran for fewer rows: {other})"
        rows = all_rows.shape[:1] == (batch.size,) and some_rows.shape[:1] == (half,)
        if rows and not _alike(all_rows[:half], some_rows):
            return name
    return None


def value_reads(model: nn.Module, batch: TensorBatch) -> list[str]:
    """Return ``file:line`` of every place in forward that turns a tensor into a Python value."""
    reads = _Reads()
    with torch.no_grad(), _same_buffers(model), reads:
        call_model(model, batch.inputs)
    return sorted(reads.places)


def moved_buffers(model: nn.Module, batch: TensorBatch) -> list[str]:
    """Return the names of the buffers that one forward pass changes."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad(), _same_buffers(model):
        call_model(model, batch.inputs)
        after = dict(model.named_buffers())
        return [n for n, value in before.items() if n in after and not torch.equal(after[n], value)]


class _Reads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") in READS:
            frame = sys._getframe(1)
            while frame.f_back and "/torch/" in frame.f_code.co_filename:
                frame = frame.f_back
            self.places.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return func(*args, **(kwargs or {}))


def _outputs_by_module(model: nn.Module, inputs: Any) -> list[tuple[str, Tensor]]:
    """Run forward and return ``(module name, output tensor)`` in the order of completion."""
    found: list[tuple[str, Tensor]] = []
    handles = []
    for name, module in model.named_modules():

        def note(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
            label = name or "the model's own forward"
            found.extend((label, t.detach().clone()) for _, t in tree.tensors(output))

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
def _same_buffers(model: nn.Module) -> Iterator[None]:
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(state[name])
