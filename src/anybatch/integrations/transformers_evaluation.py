"""A step of evaluation in the memory that training has: one forward of the batch, in parts.

transformers evaluates a batch of ``per_device_eval_batch_size`` in one piece, of any size. A loss
that is traced adds up over parts of the batch exactly, and the rows of other outputs can be joined;
so micro-batches that fit yield the same numbers. Outputs without rows, and a loss that is not
traced, are left to transformers, in one piece.

Source: transformers 5.23, ``Trainer.prediction_step``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import tree
from anybatch.distributed.local_batch import Layout
from anybatch.engine.engine import Engine
from anybatch.errors import AnybatchError, BudgetError
from anybatch.execution.inspection import layout_of
from anybatch.integrations.transformers_padding import Trimmed
from anybatch.loss.traced import WEIGHTS, OfModel

Outcome = tuple[Any, Any, Any]
"""Loss, outputs and labels, as ``Trainer.prediction_step`` returns them."""

OWN = ("loss", "losses of", WEIGHTS)
"""Values that are traced with the outputs of a model."""


class Evaluation:
    """Evaluates batches of a model that returns its loss.

    Args:
        model: of transformers.
        optimizer: its state is resident during evaluation, too; None where there is none.
        options: arguments of an `Engine`; of a plan, which is for training, only the micro-batch.
    """

    def __init__(self, model: nn.Module, optimizer: Any, options: dict[str, Any]) -> None:
        if options.get("plan") is not None:
            options = {"micro_batch": options["plan"].micro_batch}
        self.model, self.optimizer = model, optimizer
        self._ears = Trimmed(model)
        self.engine = Engine(self._ears, OfModel(self._ears), optimizer=optimizer, **options)

    def step(
        self, trainer: Any, inputs: dict[str, Any], ignored: list[str] | None, *, loss_only: bool
    ) -> Outcome | None:
        """Return loss, outputs and labels of a batch; None where it has to be run in one piece.

        Outputs are on the host: the device may not hold those of all micro-batches.

        Args:
            trainer: the trainer that evaluates.
            inputs: arguments of the model, with labels.
            ignored: names of outputs to skip; None uses those of the model's config.
            loss_only: outputs and labels are not wanted.

        Raises:
            BudgetError: a single sample does not fit.
        """
        if ignored is None and hasattr(trainer.model, "config"):
            config = trainer.model.config
            ignored = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        found = self._run(inputs, ignored or [], loss_only=loss_only)
        if found is None or loss_only:
            return None if found is None else (found[0], None, None)
        labels = tuple(inputs[name].detach() for name in trainer.label_names)
        outputs = list(found[1]) if self._ears.lists else found[1]
        return found[0], _only(outputs), _only(labels)

    def _run(
        self, inputs: dict[str, Any], ignored: list[str], *, loss_only: bool
    ) -> tuple[Tensor, tuple[Any, ...]] | None:
        self._ears.training = self.model.training
        parts: list[Any] = []

        def keep(outputs: Any, _targets: Any) -> None:
            parts.append(tree.map_tensors(Tensor.cpu, _wanted(outputs, ignored)))

        try:
            loss = self.engine.evaluate(inputs, observe=None if loss_only else keep)
            if len(parts) < 2:
                return loss, parts[0] if parts else ()
            outputs: tuple[Any, ...] = tree.join(parts, self._layout(inputs, ignored))
        except BudgetError:
            raise
        except AnybatchError:
            return None
        return loss, outputs

    def _layout(self, inputs: dict[str, Any], ignored: list[str]) -> Layout:
        """Return where the outputs hold their samples, as one sample and two of them show."""
        device, size = next(self.model.parameters()).device, tree.batch_size(inputs=inputs)
        with torch.no_grad():
            one, two = (
                _wanted(self._ears(**_on(device, tree.rows(inputs, 0, n, size))), ignored)
                for n in (1, 2)
            )
        return layout_of(two, one, 2, 1)


def _wanted(outputs: Mapping[str, Any], ignored: list[str]) -> tuple[Any, ...]:
    return tuple(value for name, value in outputs.items() if name not in {*OWN, *ignored})


def _on(device: torch.device, inputs: Any) -> Any:
    return tree.map_tensors(lambda tensor: tensor.to(device), inputs)


def may_divide(trainer: Any, model: nn.Module, inputs: Any) -> bool:
    """Say whether a batch may be evaluated in parts: by one process, with the model's own loss."""
    args, names = trainer.args, trainer.label_names
    own = trainer.compute_loss_func is None and trainer.label_smoother is None
    there = bool(names) and all(isinstance(inputs.get(name), Tensor) for name in names)
    cast = args.bf16_full_eval or args.fp16_full_eval
    return own and there and not cast and args.world_size == 1 and not model.training


def _only(values: Sequence[Any]) -> Any:
    """Return the one value, where there is one."""
    return values[0] if len(values) == 1 else values
