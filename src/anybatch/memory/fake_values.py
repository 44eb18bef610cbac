"""Values of integers and masks in a dry run, for a package that reads them.

transformers omits a causal mask where no token is masked, and reads positions and masks to see it.
For a tensor without data it makes the mask, of tokens squared, which no step holds. So a fake of
integers remembers the kernel that made it, down to the batch, and these kernels are run where the
package reads a number (test_a_mask_that_no_step_makes_is_not_foreseen).

    batch ──> cumsum ──> diff ──> ne 1 ──> all ──read──> True, as in the step
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from anybatch.memory.meter import tensors_in, written_by

PACKAGE = "transformers.utils.import_utils"
"""Module whose `is_fake_tensor` says where values are not to be read."""

READERS = ("transformers.masking_utils", PACKAGE)
"""Modules whose reads have an answer; others read the rows of a real step."""

MOST = 1 << 22
"""Numbers of the largest tensor that is computed: a mask of 2,048 tokens squared."""

SOURCE, WRITTEN = "_anybatch_source", "_anybatch_written"
"""Attributes of a fake: the source of its values; of its storage: it has others now."""


@dataclass(eq=False)
class _Source:
    """Values of a fake: a function and its arguments, among which are sources of other fakes."""

    func: Callable[..., Tensor]
    arguments: Any

    def values(self, made: dict[_Source, Tensor]) -> Tensor:
        """Return the values on the host, and add them to those that are `made` for a read."""
        if self not in made:
            args, kwargs = _map(self.arguments, partial(_value, made))
            made[self] = self.func(*args, **kwargs)
        return made[self]


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments of a kernel with each leaf changed."""
    if isinstance(value, list | tuple):
        return [_map(one, change) for one in value]
    if isinstance(value, dict):
        return {name: _map(one, change) for name, one in value.items()}
    return change(value)


def _value(made: dict[_Source, Tensor], leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("cpu")
    if isinstance(leaf, Tensor):
        return leaf.cpu()
    return leaf.values(made) if isinstance(leaf, _Source) else leaf


def source_of(tensor: Tensor) -> _Source | None:
    """Return the source of a fake's values; None where it has none."""
    with torch._C.DisableTorchFunction():
        written = getattr(tensor.untyped_storage(), WRITTEN, False)
    return None if written else getattr(tensor, SOURCE, None)


def begin(fake: Tensor, leaf: Tensor) -> None:
    """Take the rows of a tensor of the batch for the values of a fake."""
    _set(fake, _rows, ((leaf, len(fake)), {}))


def _rows(leaf: Tensor, count: int) -> Tensor:
    """Return `count` rows of the batch, those with the smallest sums first.

    These are padded or packed, for which a mask is made, and the first micro-batch counts for all
    (test_one_padded_row_has_its_mask_foreseen).
    """
    order = (leaf.flatten(1).sum(1) if leaf.dim() > 1 else leaf).argsort()
    return leaf[order[torch.arange(count) % max(1, len(order))]]


def _set(fake: Tensor, func: Callable[..., Tensor], arguments: Any) -> None:
    """Set the source of a fake, if it is of integers and of no more numbers than `MOST`."""
    if not (fake.is_floating_point() or fake.is_complex() or fake.numel() > MOST):
        setattr(fake, SOURCE, _Source(func, arguments))


def record(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Set the source of a kernel's result, if all of its arguments have sources."""
    for one in written_by(func, args, kwargs):
        setattr(one.untyped_storage(), WRITTEN, True)
    if type(result) is not FakeTensor or func._schema.is_mutable:
        return
    drawn = torch.Tag.nondeterministic_seeded in func.tags
    if not drawn and "empty" not in func._schema.name and _has_sources((args, kwargs)):
        _set(result, func, _map((args, kwargs), _source))  # a fake that is held would count


def _has_sources(arguments: Any) -> bool:
    """Say whether each tensor has values: a real one is a constant that forward names."""
    return all(type(one) is not FakeTensor or source_of(one) for one in tensors_in(arguments))


def _source(leaf: Any) -> Any:
    return source_of(leaf) if type(leaf) is FakeTensor else leaf


def number(tensor: Tensor) -> Any:
    """Return the number of a fake; None without a source, or if no module of `READERS` reads it."""
    source = source_of(tensor)
    if source is None or not _reader().startswith(READERS):
        return None
    with _disable_current_modes(), torch.no_grad():
        return source.values({}).item()


def _reader() -> str:
    """Return the name of the module that reads: the first that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(("torch.", "anybatch.")):
            return name
        frame = frame.f_back
    return ""


def is_read() -> bool:
    """Say whether there is a package that reads values."""
    return PACKAGE in sys.modules


@contextmanager
def read() -> Iterator[None]:
    """Let the package read fakes that have values in the body, as it reads real tensors."""
    package = sys.modules.get(PACKAGE)
    before = getattr(package, "is_fake_tensor", None)
    if before is None:
        yield
        return

    def is_fake_tensor(x: Any) -> bool:
        return bool(before(x)) and source_of(x) is None

    package.is_fake_tensor = is_fake_tensor  # type: ignore[union-attr]
    try:
        yield
    finally:
        package.is_fake_tensor = before  # type: ignore[union-attr]
