"""Padding that no micro-batch needs: rows in order of length, columns that are padding in all cut.

A batch is collated once, and so padded to the longest of all its rows. A Trainer that accumulates
pads each of its small batches to its own longest, which is less to compute. What comes behind the
last token of every row of a micro-batch is nothing to a model that heeds its attention mask, so it
is cut off; and micro-batches of rows of like lengths have the least of it.

    a b c d e       a b c d e          sorted by length, the longest first: a lack of memory
    f g . . .  ──>  h i j k .          shows at once; the sum over rows has no order
    h i j k .       f g | . . .

Whether the model heeds its mask is asked: one short row must have one loss, cut or not. Cut are
only batches of token ids, masks and labels, padded on the right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import tree
from anybatch._check import permuted
from anybatch.batch import TensorBatch
from anybatch.fakes import is_fake
from anybatch.loss.heard import Heard, Overheard, first_loss
from anybatch.meeting import looks_here

Inputs = dict[str, Any]
FIRST = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
SECOND = ("decoder_input_ids", "decoder_attention_mask")
IGNORED = -100


class Trimmed(Overheard):
    """An `Overheard` model that is trained on rows without the padding that they share.

    Args:
        model: of transformers.

    Attributes:
        trims: whether it does; None before it is known.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.trims: bool | None = None
        self._pair = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))

    def forward(self, *args: Any, **kwargs: Any) -> Heard:
        """Run the model and listen; looked at, the rows are left as they are."""
        if self.trims and not args and not looks_here():
            kwargs = self._cut(kwargs)
        return super().forward(*args, **kwargs)

    def ordered(self, inputs: Inputs) -> Inputs:
        """Return a batch with the longest rows first, where padding is cut."""
        if self.trims is None:
            self.trims = _may(inputs, pair=self._pair) and self._heeds(inputs)
        if not self.trims or not _may(inputs, pair=self._pair):
            return inputs
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

    def _heeds(self, inputs: Inputs) -> bool:
        """Say whether the shortest row has the same loss without its padding."""
        size = len(inputs["attention_mask"])
        at = int(inputs["attention_mask"].sum(1).argmin())
        device = next(self.model.parameters()).device
        row = tree.map_tensors(lambda t: t.to(device), tree.rows(inputs, at, at + 1, size))
        with torch.no_grad(), _evaluating(self.model):
            whole, cut = (float(first_loss(self.model(**x))) for x in (row, self._cut(row)))
        bound = torch.finfo(torch.float32).eps ** 0.5
        nothing = whole != whole and cut != cut  # no token of it is predicted
        return nothing or abs(whole - cut) <= bound * abs(whole)


def _may(inputs: Inputs, *, pair: bool) -> bool:
    """Say whether a batch is of tokens that are padded on the right, and nothing else."""
    mask = inputs.get("attention_mask")
    known = {*FIRST, "labels", *(SECOND if pair else ())}
    if not isinstance(mask, Tensor) or mask.dim() != 2 or is_fake(mask) or set(inputs) - known:
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
