"""Padding that no micro-batch needs, cut on request: columns that are padding in all rows.

A batch is collated once, and so padded to the longest of all its rows. A Trainer that accumulates
pads each of its small batches to its own longest, which is less to compute. Columns behind the last
token of every row of a micro-batch do not matter to a model that uses its attention mask. With
``cut_padding=True`` they are cut, and rows are sorted by length, so that there is more to cut.

    a b c d e       a b c d e          sorted by length, the longest first: a lack of memory
    f g . . .  ──>  h i j k .          shows at once; the sum over rows has no order
    h i j k .       f g | . . .

No comparison of values proves that a model uses its mask: a maximum over all columns contains
padding for some rows only. So padding is cut only on request, the plan says "not shown", and a
model is refused if the loss of a padded row changes without its padding. Cut are only batches of
token ids, masks and labels, padded on the right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import tree
from anybatch.core.batch import TensorBatch
from anybatch.core.meeting import looks_here
from anybatch.errors import NotExactError
from anybatch.loss.traced import OfModel, TracedModel, TracedOutputs, first_loss
from anybatch.memory.fakes import is_fake
from anybatch.tools.check import permuted

Inputs = dict[str, Any]
FIRST = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
SECOND = ("decoder_input_ids", "decoder_attention_mask")
IGNORED = -100


CUT = (
    "padding is cut, as cut_padding=True asks, and a model that computes with the places of "
    "padding gives another gradient"
)
HEEDS = (
    "a model must use its attention mask where cut_padding=True, and the loss of a row of this "
    "batch is {full:.8g} with its padding and {cut:.8g} without: leave cut_padding out"
)


class Trimmed(TracedModel):
    """A `TracedModel` that is trained on rows without the padding that they share.

    Args:
        model: of transformers.
        cuts: whether it is; by default it is trained on all columns.

    Attributes:
        doubts: why the gradient is not shown to be that of the padded batch.
    """

    def __init__(self, model: nn.Module, *, cuts: bool = False) -> None:
        super().__init__(model)
        self.doubts = (CUT,) if cuts else ()
        self._cuts, self._compared, self._rows = cuts, False, 0
        self._pair = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))

    def forward(self, *args: Any, **kwargs: Any) -> TracedOutputs:
        """Run the model and trace its loss, without cuts in the full batch and inspected rows."""
        if self._cuts and not args and not looks_here() and _rows_of(kwargs) < self._rows:
            kwargs = self._cut(kwargs)
        return super().forward(*args, **kwargs)

    def ordered(self, inputs: Inputs) -> Inputs:
        """Return a batch with the longest rows first, where padding is cut.

        Raises:
            NotExactError: the first row that has padding has another loss without it.
        """
        if not self._cuts or not _may(inputs, pair=self._pair):
            return inputs
        self._rows = _rows_of(inputs)
        if not self._compared:
            self._compare(inputs)
        lengths = inputs["attention_mask"].sum(1)
        order = torch.argsort(lengths, descending=True, stable=True).cpu()
        moved: Inputs = permuted(TensorBatch.of(inputs, None), order).inputs
        return moved

    def _cut(self, inputs: Inputs) -> Inputs:
        if not _may(inputs, pair=self._pair):
            return inputs
        short = dict(inputs)
        for names, width in _groups(inputs, pair=self._pair):
            short |= {name: inputs[name][:, :width].contiguous() for name in names}
        return short

    def _compare(self, inputs: Inputs) -> None:
        """Refuse a model if the loss of the shortest row changes without its padding."""
        size = len(inputs["attention_mask"])
        at = int(inputs["attention_mask"].sum(1).argmin())
        device = next(self.model.parameters()).device
        row = tree.map_tensors(lambda t: t.to(device), tree.rows(inputs, at, at + 1, size))
        short = self._cut(row)
        if all(short[name].shape == row[name].shape for name in row):
            return  # no row has padding, which tells nothing of those that have
        with torch.no_grad(), _evaluating(self.model):
            full, cut = (float(first_loss(self.model(**x))) for x in (row, short))
        if full != full and cut != cut:
            return  # no token of it is predicted
        self._compared = True
        bound = torch.finfo(torch.float32).eps ** 0.5
        if not abs(full - cut) <= bound * abs(full):
            raise NotExactError(HEEDS.format(full=full, cut=cut))


class OfTrimmed(OfModel):
    """The loss of a model that is `Trimmed`; it has the doubts of that model."""

    def __init__(self, model: Trimmed, way_out: str) -> None:
        super().__init__(model, way_out)
        self.doubts = self.always = model.doubts


def _rows_of(inputs: Inputs) -> int:
    mask = inputs.get("attention_mask")
    return len(mask) if isinstance(mask, Tensor) and mask.dim() else 0


def _may(inputs: Inputs, *, pair: bool) -> bool:
    """Say whether a batch is of tokens that are padded on the right, and nothing else."""
    mask = inputs.get("attention_mask")
    recognised = {*FIRST, "labels", *(SECOND if pair else ())}
    if not isinstance(mask, Tensor) or mask.dim() != 2 or is_fake(mask) or set(inputs) - recognised:
        return False
    return bool((mask[:, 1:] <= mask[:, :-1]).all())


def _groups(inputs: Inputs, *, pair: bool) -> Iterator[tuple[set[str], int]]:
    """Yield names of tensors that have their columns in common, and how many columns matter."""
    mask, labels = inputs["attention_mask"], inputs.get("labels")
    each = _each_token(labels)
    used, names = mask != 0, {name for name in FIRST if name in inputs}
    if each is not None and not pair and each.shape == mask.shape:
        used, names = used | (each != IGNORED), names | {"labels"}
    yield names, _width(used)
    if pair and each is not None:
        used, names = each != IGNORED, {"labels", *(name for name in SECOND if name in inputs)}
        if "decoder_attention_mask" in inputs:
            used = used | (inputs["decoder_attention_mask"] != 0)
        yield names, _width(used)


def _each_token(labels: Any) -> Tensor | None:
    """Return labels that are one a token."""
    tokens = isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()
    return labels if tokens else None


def _width(used: Tensor) -> int:
    columns = used.any(0).nonzero()
    return int(columns[-1]) + 1 if len(columns) else 1


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Draw nothing and move nothing in the body."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
