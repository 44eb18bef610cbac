"""Rows of a TRL batch: the log-probs that a model has for them, and TRL's losses of these.

A model is asked once which arguments a loss gives it (`asks`). `Scored` then runs it on some rows,
and returns log-probs and entropies of each token. TRL's `compute_loss` computes the loss of rows
from these (`Answers`), so no formula of a loss is written here. What is written is by what each
is divided (`PAIRWISE`, `COUNTS`): `SumOverRows` is a sum over rows, `Once` any other loss.

Source: TRL 1.16, ``trainer/utils.py`` (``add_fused_lm_head``), ``DPOTrainer._compute_loss``,
``GRPOTrainer._compute_loss``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from trl.trainer.utils import FusedCausalLMOutput, use_adapter

from anybatch.errors import NotYetError
from anybatch.loss.base import Loss, Part, Scope, Total

Rows = dict[str, Any]
ANSWERS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
"""Values that a model returns for each token of a row."""


class ModelCalled(Exception):  # noqa: N818 it is no error
    """The arguments of the call that a loss makes to its model."""

    def __init__(self, arguments: Rows) -> None:
        super().__init__()
        self.arguments = arguments


def asks(*_: Any, **arguments: Any) -> Any:
    """Stand for a model, and stop with its arguments."""
    raise ModelCalled(arguments)


class Answers:
    """Stand-in for a model that has returned its outputs."""

    def __init__(self, outputs: Rows) -> None:
        self._outputs = outputs

    def __call__(self, *_: Any, **arguments: Any) -> Any:
        """Return the outputs."""
        if not arguments.get("fused_lm_head"):
            raise NotYetError(
                "a loss must be computed from log-probs, and it asks for the logits of the model: "
                "use TRL's own trainer for it"
            )
        return FusedCausalLMOutput(**self._outputs)


class Scored(nn.Module):
    """A policy that returns values of each token, with the log-probs of a reference.

    Args:
        model: the policy, with TRL's fused head.
        refers: whether the log-probs of a reference are needed.
        reference: it; None takes the policy with its adapter disabled, or its adapter "ref".
        pairs: a sample is two rows, of shape [n, 2, T].

    Attributes:
        constants: arguments of the model that are no tensors.
    """

    def __init__(
        self, model: nn.Module, *, refers: bool, reference: nn.Module | None, pairs: bool
    ) -> None:
        super().__init__()
        self.model, self.reference = model, reference
        self.constants: Rows = {}
        self._refers, self._pairs = refers, pairs

    def forward(self, **arguments: Any) -> Rows:
        """Return tensors of shape [n, T], or [n, 2, T] for pairs, by name."""
        if self._pairs:
            arguments = unpaired(arguments)
        arguments |= self.constants
        found = self.model(**arguments)
        outputs = {name: found[name] for name in ANSWERS if found.get(name) is not None}
        if self._refers:
            with torch.no_grad(), self._referring() as reference:
                outputs["reference"] = reference(**arguments).log_probs
        return paired(outputs) if self._pairs else outputs

    @contextmanager
    def _referring(self) -> Iterator[nn.Module]:
        if self.reference is not None:
            yield self.reference
            return
        adapters: Any = self.model.peft_config
        with use_adapter(self.model, "ref" if "ref" in adapters else None):
            yield self.model


def paired(rows: Rows) -> Rows:
    """Return tensors of shape [n, 2, ...] from those of [chosen, rejected] rows, [2n, ...]."""
    return {name: _each_pair(name, value) for name, value in rows.items()}


def _each_pair(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0 or name.startswith("ref_"):
        return value
    return torch.stack(value.chunk(2), 1)


def unpaired(pairs: Rows) -> Rows:
    """Return [chosen, rejected] rows, as TRL takes them."""
    return {
        name: torch.cat(value.unbind(1))
        if isinstance(value, Tensor) and value.dim() and not name.startswith("ref_")
        else value
        for name, value in pairs.items()
    }


class Once(Loss):
    """A loss of TRL's in which samples meet: computed once, on the outputs of all.

    Args:
        loss: of outputs and what else it needs of the rows; it restores the state that it writes.
    """

    couples = True

    def __init__(self, loss: Callable[[Rows, Rows], Tensor]) -> None:
        self.name, self._loss = "TRL's own, on all outputs", loss

    def full_batch(self, outputs: Any, micro: Any) -> Tensor:
        """Return the loss of all samples."""
        return self._loss(outputs, micro.targets)

    def totals(self, scope: Scope) -> list[Total] | None:  # noqa: ARG002
        """Samples meet."""
        return None

    def parts(self, outputs: Any, micro: Any, totals: list[Total]) -> list[Part]:
        """Raise NotImplementedError: there are none."""
        raise NotImplementedError


class SumOverRows(Once):
    """A loss of TRL's that is a sum over rows, divided by a count of the full batch.

    Args:
        loss: as for `Once`; of some rows it is divided by their count.
        of: what is counted, in words.
        count: the count of rows.
    """

    couples = False

    def __init__(
        self, loss: Callable[[Rows, Rows], Tensor], of: str, count: Callable[[Rows], Any]
    ) -> None:
        super().__init__(loss)
        self.name, self.count = f"TRL's own / {of}", count

    def totals(self, scope: Scope) -> list[Total] | None:
        """Count over the full batch."""
        assert scope.batch is not None
        return [Total(1.0, self.count(scope.batch.targets))]

    def parts(self, outputs: Any, micro: Any, totals: list[Total]) -> list[Part]:
        """Return the numerator of some rows."""
        del totals
        return [Part(self.numerator(outputs, micro.targets), lambda: self.count(micro.targets))]

    def numerator(self, outputs: Rows, targets: Rows) -> Tensor:
        """Return the sum over some rows."""
        numerator: Tensor = self._loss(outputs, targets) * self.count(targets)
        return numerator


PAIRWISE = {
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm",
}  # fmt: skip
"""Values of DPO's ``loss_type`` that are means over pairs."""


def _tokens(rows: Rows) -> Tensor:
    mask = rows["completion_mask"]
    mask = mask * rows["tool_mask"] if "tool_mask" in rows else mask
    counted: Tensor = mask.sum().clamp(min=1)
    return counted


def _completions(rows: Rows) -> int:
    return len(rows["completion_ids"])


def _generated(rows: Rows) -> Tensor:
    """Return this rank's share, by which TRL divides, of the tokens of all ranks."""
    counted: Tensor = rows["num_items_in_batch"].clamp(min=1) / PartialState().num_processes
    return counted


COUNTS: dict[str, tuple[str, Callable[[Rows], Any]]] = {
    "bnpo": ("tokens", _tokens),
    **dict.fromkeys(("grpo", "sapo", "dr_grpo", "luspo"), ("completions", _completions)),
    **dict.fromkeys(("dapo", "cispo", "vespo"), ("generated tokens", _generated)),
}
"""Values of GRPO's ``loss_type``, with what divides them; the last is a number of the batch."""


def as_large(outputs: Rows) -> Tensor:
    """Return a number that holds at least the memory of any of TRL's losses, for a dry run."""
    value = outputs["log_probs"]
    for _ in range(INTERMEDIATE):
        value = value.exp()
    loss = value.sum()
    total: Tensor = loss + outputs["entropy"].sum() if "entropy" in outputs else loss
    return total


INTERMEDIATE = 16
"""Tensors of the size of the log-probs that a loss holds; TRL's hold fewer."""
