"""Notes about samples that are followed, and about the code that reads their numbers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from anybatch.core.barrier import samples_here
from anybatch.execution.proof.masks import CUT, SAMPLES
from anybatch.execution.proof.places import Made, Shapes, plain


class NormCall(NamedTuple):
    """A call of batch normalisation.

    Attributes:
        rows: set of samples -> how many values of a channel have that set.
        cut: the batch was cut by position before.
    """

    path: str
    rows: dict[int, Fraction]
    cut: bool
    values: int


def norm_call(path: str, x: Tensor, mask: Tensor | None) -> NormCall:
    """Return the record of a call of batch normalisation on [n, C, ...], which has this mask."""
    channels = max(x.shape[1], 1)
    if mask is None:
        return NormCall(path, {}, False, x.numel() // channels)
    values, counts = torch.unique(mask & SAMPLES, return_counts=True)
    each = x.numel() // mask.numel()
    pairs = zip(values.tolist(), counts.tolist(), strict=True)
    # As fractions: where samples are channels, 8 // 4 and 8 // 3 values are both 2
    # (test_samples_that_are_channels_are_refused).
    rows = {value: Fraction(count * each, channels) for value, count in pairs}
    return NormCall(path, rows, bool((mask & CUT).any()), x.numel() // channels)


class MaskedResult(NamedTuple):
    """A result of a kernel, and the dimensions along which samples lie."""

    path: str
    name: str
    shape: tuple[int, ...]
    lies: frozenset[int]


OPERATOR = "a higher-order operator could not be followed in"
SAVING = "saved_tensors_hooks change what autograd saves in"
COLLISION = "two samples may write to the same place, which they choose in"
POSITION = "rows are chosen by their place in the batch in"
PART = "a part of the batch, cut by position, is brought together in"
COUNTER = "forward computes with num_batches_tracked, which BatchNorm moves, in"
FIXED = "rows are read or written by their place in the batch in"
COUNTED = "numbers are others for more rows than for fewer in"

OF_ANY_ROWS = (OPERATOR, SAVING, COLLISION, POSITION, PART, COUNTER)
"""Doubts that fewer rows raise, too, in their order; the others are of the forward of all rows."""


@dataclass
class Notes:
    """Findings that are recorded while samples are followed.

    Attributes:
        read: places where Python reads a number of a sample: (module, sort).
        values: numbers that Python has read of any tensor, in order.
        unfollowed: kernels that could not be followed: (module, kernel, error).
        lost: where samples had met before a loss inside the model; "" where none did.
        norms: calls of batch normalisation, in order.
        frequencies: tables whose gradient is scaled by how often a batch has each entry.
        shuffles: random orders that were drawn: (module, how long).
        draws: random numbers that were drawn: (module, kernel, shapes).
        seeded: where a generator was not in the state after the last kernel, or before the first.
        backward: where samples meet in backward.
        numbers: Python's numbers in arithmetic of kernels: (module, kernel, numbers).
        made: kernels in which no sample has a part (`anybatch.execution.proof.places`).
        where: words of a doubt, such as `FIXED` -> the first place that it is of.
        lines: number of a call -> its first result, if samples have had a part in it.
        longest: where rows are padded to the longest of the call, and whether lengths differ.
        few: where rows were brought together that are chosen by their values, and too few were.
        mixes_orders: a kernel computed with rows in an order and with rows in none.
        cuts: rows are sliced along the samples.
        made_by_python: Python makes numbers that are as many as the samples.
        local: some rows were normalised by themselves, as was requested.
        sizes: Python may know how many samples there are.
        lists: Python reads the memory of a tensor, of samples or not (``tolist``).
    """

    read: list[tuple[str, str]] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    unfollowed: list[tuple[str, str, str]] = field(default_factory=list)
    lost: str = ""
    norms: list[NormCall] = field(default_factory=list)
    frequencies: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    shuffles: list[tuple[str, int]] = field(default_factory=list)
    draws: list[tuple[str, str, Shapes]] = field(default_factory=list)
    seeded: list[str] = field(default_factory=list)
    numbers: list[tuple[str, str, tuple[Any, ...]]] = field(default_factory=list)
    made: dict[int, Made] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    lines: dict[int, MaskedResult] = field(default_factory=dict)
    longest: list[tuple[str, bool]] = field(default_factory=list)
    few: list[str] = field(default_factory=list)
    mixes_orders: bool = False
    cuts: bool = False
    made_by_python: bool = False
    local: bool = False
    sizes: bool = False
    lists: bool = False

    @property
    def may_count(self) -> bool:
        """Whether the results may depend on the number of samples."""
        calls = (
            OPERATOR in self.where or self.unfollowed or self.read or any(n.cut for n in self.norms)
        )
        return self.sizes or bool(calls)


def ours(prefixes: tuple[str, ...] = ()) -> bool:
    """Return whether this library or a listed module does the read, and not a user's code.

    A mode of ours that only passes a call on does not read. Prefixes of modules default to
    `READERS`.
    """
    frame, measures = sys._getframe(1), False
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        passes = name.startswith("anybatch.") and frame.f_code.co_name in PASSES
        if name.startswith(prefixes or READERS):
            return True
        measures |= name.startswith(METRICS)
        if not passes and not name.startswith(("torch.", "anybatch.execution.proof.", METRICS)):
            return bool(name.startswith("anybatch.integrations." if measures else "anybatch."))
        frame = frame.f_back
    return False


METRICS = "torchmetrics."
"""Modules that read numbers; their values have all samples where an integration calls them."""

PASSES = frozenset(("__torch_function__", "__torch_dispatch__"))
"""Methods of modes, which call the intercepted function."""

COUNTING = ("torch.nn.modules.batchnorm",)
"""Modules of batch normalisation, which count their calls."""

READERS = (
    *("torch.nn.modules.rnn", "torch.nn.utils.rnn", "torch.distributions."),
    "transformers.masking_utils",
)
"""Modules that read numbers of samples, and compute the same for each row for any of them.

Packed sequences: how many samples a step of time has. Distributions: whether their arguments are
valid. transformers: whether a mask masks anything, which is left out where it does not.
"""


def smaller_copies(made: list[Tensor], operands: list[Tensor]) -> tuple[Tensor, ...]:
    """Return copies of results with fewer numbers than an operand.

    Functions that have the rows of the full batch may count them; a metric may count what it has.
    """
    largest = max(one.numel() for one in operands)
    if any(one.numel() >= largest for one in made) or samples_here() == -1 or ours():
        return ()
    with _disable_current_modes():
        return tuple(one.detach().clone() for one in made if plain(one))
