"""Check of a declared loss that reads non-tensor rows: the full batch against its micro-batches.

Python's computations on a list (the largest entry, whether a word is among them) leave no trace in
the tensors. So the loss is computed on the full batch and on every micro-batch, with the outputs of
a few rows in place of all, and each row must have the same loss and the same gradient in both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybatch.core import tree
from anybatch.core.batch import MicroBatch, TensorBatch
from anybatch.core.memory_errors import out_of_memory
from anybatch.execution.proof.declared import INSTEAD, LossRows, Own, RowLoss, alike
from anybatch.execution.proof.halves import leaf_of
from anybatch.execution.proof.verdict import Verdict
from anybatch.loss.entries import holds, unread

READS = "the declared loss: it reads rows that are no tensors, which cannot be followed"

FAILS = "the declared loss: it fails on the rows of the full batch"
LISTS = "a list, a text or an array of all rows"
PLACES = "the place of a row in the batch, or with how many rows there are"

MOST = 1 << 20
"""Numbers of outputs and targets that are compared: no more memory than a step."""


@dataclass(frozen=True)
class Entries:
    """The lists, texts and arrays of a batch, and a declared loss.

    Args:
        own: of the loss.
        few: a few rows.
        layout: where each output holds the samples; None where it holds none.
    """

    own: Own
    few: LossRows
    layout: Sequence[int | None]

    def judge(self, batch: TensorBatch | None, micro_batch: int, *, counts: bool) -> Verdict:
        """Return the verdict on a loss that reads non-tensor rows, or the number of rows.

        A constant that is cut to the rows, whose first entries are alike, is another one for later
        rows of the full batch only.

        Args:
            batch: the full one; None if it is unavailable, or memory does not permit to compare.
            micro_batch: samples in a micro-batch.
            counts: the loss asks how many rows there are.
        """
        read = self.read
        if not (read or counts) or all(axis is None for axis in self.layout):
            return Verdict()
        doubts = (READS,) if read else ()
        if batch is None or self._numbers(batch) > MOST:
            return Verdict("", doubts)
        words = LISTS if read else PLACES
        outside = sys.exception()
        try:
            return Verdict(self._differs(batch, micro_batch, words), doubts)
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
            if out_of_memory(error, outside=outside):
                raise
        return Verdict("", (READS,) if read else (FAILS,))

    @property
    def read(self) -> bool:
        """Whether the loss asks for any of them."""
        few = self.few
        if not (holds(few.targets) or holds(few.outputs)):
            return False
        reads: list[type] = []
        micro = MicroBatch(None, unread(few.targets, reads), few.size)
        try:
            with torch.no_grad():
                self.own(unread(few.outputs, reads), micro)
        except Exception:  # that of a stand-in, or what was made of it
            return True
        return bool(reads)

    def _numbers(self, batch: TensorBatch) -> int:
        outputs = sum(t.numel() for t in tree.flat(self.few.outputs)) // self.few.size
        return outputs * batch.size + sum(t.numel() for t in tree.flat(batch.targets))

    def _differs(self, batch: TensorBatch, micro_batch: int, words: str) -> str:
        """Return how losses of the full batch differ from those of its parts; "" where equal."""
        places = torch.arange(batch.size) % self.few.size
        pairs = zip(tree.flat(self.few.outputs), self.layout, strict=True)
        rows = [
            t.movedim(axis, 0).index_select(0, places.to(t.device))
            for t, axis in pairs
            if axis is not None
        ]
        device = rows[0].device
        targets = tree.map_tensors(lambda t: t.to(device), batch.targets)
        full, again = (self._losses(rows, targets) for _ in range(2))
        if not all(map(alike, full, again)):
            return ""  # it draws
        found = []
        for begin in range(0, batch.size, micro_batch):
            end = min(begin + micro_batch, batch.size)
            some = tree.rows(targets, begin, end, batch.size)
            found.append(self._losses([row[begin:end] for row in rows], some))
        losses, *gradients = zip(*found, strict=True)
        joined = torch.cat(losses) if full[0].dim() else torch.stack(losses).sum()
        parts = [joined, *map(torch.cat, gradients)]
        if all(map(alike, full, parts)):
            return ""
        return (
            "a declared loss must give each sample the same loss with any other samples, and it "
            f"gives other numbers for {batch.size} rows than for {micro_batch} of them: it "
            f"computes with {words}. {INSTEAD}"
        )

    def _losses(self, rows: list[Tensor], targets: Any) -> list[Tensor]:
        """Return the losses, or their sum, and the gradients of the rows."""
        leaves = [leaf_of(row.clone()) for row in rows]
        loss = RowLoss(self.own, self.few.outputs, self.layout)
        with torch.enable_grad():
            found = loss(leaves, targets)
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            each: Sequence[Tensor | None] = [None] * len(trained)
            if found.requires_grad and trained:
                each = torch.autograd.grad(found.sum(), trained, allow_unused=True)
        pairs = zip(each, trained, strict=True)
        return [found.detach(), *(torch.zeros_like(t) if g is None else g for g, t in pairs)]
