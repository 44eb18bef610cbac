"""Padding that no micro-batch needs, cut on request; and evaluation in the memory of training.

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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import pytree
from anybatch.core.barrier import looks_here
from anybatch.core.batch import TensorBatch
from anybatch.distributed.local_batch import Layout
from anybatch.engine.engine import Engine
from anybatch.errors import AnybatchError, BudgetError, NotExactError
from anybatch.execution.few_rows import layout_of
from anybatch.loss.base import first_loss
from anybatch.loss.traced_model import WEIGHTS, OfModel, TracedModel, TracedOutputs
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
        row = pytree.map_tensors(lambda t: t.to(device), pytree.rows(inputs, at, at + 1, size))
        short = self._cut(row)
        if all(short[name].shape == row[name].shape for name in row):
            return  # no row has padding, which tells nothing of those that have
        with torch.no_grad(), evaluating(self.model):
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
def evaluating(model: nn.Module) -> Iterator[None]:
    """Draw nothing and move nothing in the body."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


# A step of evaluation in the memory that training has: one forward of the batch, in parts.
#
# transformers evaluates a batch of ``per_device_eval_batch_size`` in one piece, of any size. A loss
# that is traced adds up over parts of the batch exactly, and the rows of other outputs can be
# joined; so micro-batches that fit yield the same numbers. Outputs without rows, and a loss that is
# not traced, are left to transformers, in one piece.
#
# Source: transformers 5.23, ``Trainer.prediction_step``.

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
            parts.append(pytree.map_tensors(Tensor.cpu, _wanted(outputs, ignored)))

        try:
            loss = self.engine.evaluate(inputs, observe=None if loss_only else keep)
            if len(parts) < 2:
                return loss, parts[0] if parts else ()
            outputs: tuple[Any, ...] = pytree.join(parts, self._layout(inputs, ignored))
        except BudgetError:
            raise
        except AnybatchError:
            return None
        return loss, outputs

    def _layout(self, inputs: dict[str, Any], ignored: list[str]) -> Layout:
        """Return where the outputs hold their samples, as one sample and two of them show."""
        device, size = next(self.model.parameters()).device, pytree.batch_size(inputs=inputs)
        with torch.no_grad():
            one, two = (
                _wanted(self._ears(**_on(device, pytree.rows(inputs, 0, n, size))), ignored)
                for n in (1, 2)
            )
        return layout_of(two, one, 2, 1)


def _wanted(outputs: Mapping[str, Any], ignored: list[str]) -> tuple[Any, ...]:
    return tuple(value for name, value in outputs.items() if name not in {*OWN, *ignored})


def _on(device: torch.device, inputs: Any) -> Any:
    return pytree.map_tensors(lambda tensor: tensor.to(device), inputs)


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
