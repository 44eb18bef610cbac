"""`SFTTrainer`, `DPOTrainer`, `GRPOTrainer`: TRL's own, with the gradient of the undivided batch.

TRL divides the loss of each micro-batch by what that micro-batch has, or by counts of its own; a
ragged tail, completions of unequal length and losses in which samples meet are then wrong. Here
``per_device_train_batch_size * gradient_accumulation_steps`` is one batch, and each step is one
`Engine.backward`. TRL's code is entered in one place: `compute_loss` asks a model for log-probs.

    compute_loss(Asks, batch)        which arguments the model gets; it is stopped there
    engine.backward(arguments)       the model, micro-batch by micro-batch -> log-probs of each row
    compute_loss(Answers, rows)      TRL's own loss of rows whose log-probs are there

So every loss is TRL's code. A sum over rows is streamed, with the denominator of the full batch
(`SUMS`); any other loss is computed once, on the log-probs of all rows, and takes a second forward.
After each step `compute_loss` runs once more on all log-probs, without a model: this yields TRL's
metrics of the full batch, and its loss and its derivative, which the step's must equal.

Source: TRL 1.16, ``SFTTrainer.compute_loss``, ``DPOTrainer._compute_loss``,
``GRPOTrainer._compute_loss``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import pytree
from anybatch.core.plan import Plan
from anybatch.engine.engine import Engine, RngMode
from anybatch.errors import NotExactError, NotYetError
from anybatch.integrations.install import require
from anybatch.memory.fakes import is_fake

require("trl", "trl")

import transformers  # noqa: E402
import trl  # noqa: E402
from trl.trainer.base_trainer import _BaseTrainer  # noqa: E402

from anybatch.integrations.transformers import Trainer  # noqa: E402
from anybatch.integrations.trl_documents import Documents, separates  # noqa: E402
from anybatch.integrations.trl_rows import (  # noqa: E402
    COUNTS,
    PAIRWISE,
    Answers,
    ModelCalled,
    Once,
    Rows,
    Scored,
    SumOverRows,
    as_large,
    asks,
    paired,
    unpaired,
)

Refusal = tuple[Any, str, str]
"""Whether something is there, its name, and the remedy."""


class BatchTrainer(Trainer):
    """The base of this module's trainers, in the place of `transformers.Trainer`.

    Attributes:
        engine: the `Engine`, with ``engine.plan`` and ``engine.last``; None before the first step.
    """

    _pairs = False
    _trusted = (trl.SFTTrainer, trl.DPOTrainer, trl.GRPOTrainer, _BaseTrainer)
    _options: dict[str, Any]
    _metrics: dict[str, Any]
    accelerator: Any
    ref_model: Any
    data_collator: Any

    def __init__(self, args: Any, **named: Any) -> None:
        self._refuse_untried(self._in_settings(args))
        super().__init__(args=args, **(named | self._options))
        self._items_passed: Any = None
        self._verified: Engine | None = None

    def _sum(self) -> tuple[str, Callable[[Rows], Any]] | None:
        """Return the name and the count of a loss that is a sum over rows; None of any other."""
        raise NotImplementedError

    def _in_settings(self, args: Any) -> Iterator[Refusal]:
        """Yield settings that are refused, each as a condition, a name and a remedy."""
        yield (
            getattr(args, "activation_offloading", False),
            "activation_offloading=True",
            'leave it out, the engine offloads by itself where memory="8GiB" needs it',
        )

    def _in_model(self) -> Iterator[Refusal]:
        """Yield refusals of a trainer that is made, in the same form."""
        ranks = self.args.world_size
        yield (
            ranks > 1 and self._sum() is None,
            f"a loss in which samples meet, with {ranks} processes,",
            "run one process",
        )
        yield self.aux_loss_enabled, "the auxiliary loss of experts", "set router_aux_loss_coef=0.0"
        adapters = getattr(self.model, "peft_config", {}).values()
        yield (
            any(one.is_prompt_learning for one in adapters),
            "an adapter that adds virtual tokens",
            "take LoRA",
        )

    def _refuse_overrides(self) -> None:
        """Refuse a loss that is not TRL's.

        Raises:
            NotExactError: it is overridden.
        """
        losses = {"compute_loss", "_compute_loss"}
        ours = (*self._trusted, transformers.Trainer)
        classes = [one for one in type(self).__mro__ if one not in ours and losses & {*vars(one)}]
        if classes or losses & {*vars(self)}:
            owner = classes[0].__name__ if classes else "the object"
            raise NotExactError(
                f"the loss must be TRL's, whose denominator is known, and {owner} overrides "
                "compute_loss: leave it out, or write the step with anybatch.Engine"
            )

    def _refuse_untried(self, found: Iterator[Refusal]) -> None:
        """Refuse settings that have not been shown to be exact.

        Raises:
            NotYetError: the name of the setting, and what to do instead.
        """
        for there, name, instead in found:
            if there:
                raise NotYetError(
                    f"{name} is not supported in {type(self).__name__} today: {instead}, or use "
                    "TRL's own trainer"
                )

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Add the gradient of the full batch, and return its loss."""
        self._refuse_overrides()
        self._refuse_untried(self._in_settings(self.args))
        self._items_passed = num_items_in_batch
        return super().training_step(model, inputs, num_items_in_batch)

    def _split(self, inputs: Rows) -> tuple[Rows, Any]:
        """Return the arguments that the model gets, and the rows that the loss reads."""
        try:
            with self._as_before():
                self.compute_loss(asks, dict(inputs))
        except ModelCalled as called:
            arguments = called.arguments
        if "pixel_values" in arguments:
            raise NotYetError(
                f"rows with images are not supported in {type(self).__name__} today, and the batch "
                "has pixel_values: leave the images out, or use TRL's own trainer"
            )
        rows = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        self._scored.constants = {n: value for n, value in arguments.items() if n not in rows}
        return (paired(rows), paired(inputs)) if self._pairs else (rows, inputs)

    def _loss_of(self, model: nn.Module) -> tuple[nn.Module, Any]:
        reference = getattr(self, "ref_model", None) if self._pairs else None
        refers = self._pairs and not self.precompute_ref_logps
        if reference is not None:
            reference = reference.requires_grad_(False)
        self._scored = Scored(
            model, refers=refers, reference=reference if refers else None, pairs=self._pairs
        )
        found = self._sum()
        self._declared = None if found is None else SumOverRows(self._loss, *found)
        return self._scored, self._declared or Once(self._loss)

    def _loss(self, outputs: Rows, targets: Rows) -> Tensor:
        """Return TRL's loss of rows without a change of its metrics."""
        if any(map(is_fake, outputs.values())):
            return as_large(outputs)
        with self._as_before():
            return self._of_rows(outputs, targets, None)

    def _of_rows(self, outputs: Rows, targets: Rows, items: Any) -> Tensor:
        outputs = unpaired(outputs) if self._pairs else dict(outputs)
        rows = unpaired(targets) if self._pairs else dict(targets)
        reference = outputs.pop("reference", None)
        with self._referring_to(reference):
            loss: Tensor = self.compute_loss(Answers(outputs), rows, num_items_in_batch=items)
        return loss

    @contextmanager
    def _referring_to(self, log_probs: Tensor | None) -> Iterator[None]:
        if log_probs is None:
            yield
            return
        before, self.ref_model = self.ref_model, Answers({"log_probs": log_probs})
        try:
            yield
        finally:
            self.ref_model = before

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Restore TRL's notes after the body: metrics, counts, coefficients that adapt."""
        before = dict(vars(self))
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.accelerator = OneRank(self.accelerator)
        try:
            yield
        finally:
            self.__dict__.clear()
            self.__dict__.update(before)

    def _backward(self, engine: Engine, rows: Any, labels: Any, scaler: Any) -> Tensor:
        """Run the step, then TRL's loss on all outputs, for its metrics and as a proof."""
        parts: list[Rows] = []
        self._scored.training = self._scored.model.training
        loss = engine.backward(
            rows, labels, scaler=scaler, observe=lambda outputs, _: parts.append(dict(outputs))
        )
        outputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        device = outputs["log_probs"].device
        targets = pytree.map_tensors(lambda tensor: tensor.to(device), labels)
        if engine is not self._verified and len(parts) > 1:
            self._verify(outputs, targets, [len(part["log_probs"]) for part in parts])
            self._verified = engine
        with torch.no_grad():
            own = self._of_rows(outputs, targets, self._items_passed)
            if self._declared is not None and self.args.world_size > 1:
                here = self._declared.numerator(outputs, targets), self._declared.count(targets)
                both = torch.stack([torch.as_tensor(value, device=device) for value in here])
                numerator, count = self.accelerator.reduce(both)
                own = numerator / count
        bound = torch.finfo(own.dtype).eps ** 0.5 * max(1.0, abs(float(own)))
        if not abs(float(loss) - float(own)) <= bound and float(own) == float(own):
            raise NotExactError(
                f"a step must have TRL's loss of the undivided batch, {float(own):.8g}, and it has "
                f"{float(loss):.8g}: report it with the versions of trl and anybatch"
            )
        return loss

    def _verify(self, outputs: Rows, targets: Rows, sizes: list[int]) -> None:
        """Compare the derivative of TRL's loss by log-probs: of all rows, and part by part.

        Raises:
            NotExactError: they differ, so the declared count is not that of this TRL.
        """
        loss = self._declared
        if loss is None:
            return
        leaves = {
            name: value.detach().requires_grad_() if value.is_floating_point() else value
            for name, value in outputs.items()
        }
        by, n = leaves["log_probs"], sum(sizes)
        with torch.enable_grad():
            (own,) = torch.autograd.grad(self._loss(leaves, targets), by)
            summed, first = own.new_zeros(()), 0
            for size in sizes:
                there, rows = (
                    pytree.rows(tree, first, first + size, n) for tree in (leaves, targets)
                )
                summed, first = summed + loss.numerator(there, rows), first + size
            (ours,) = torch.autograd.grad(summed / loss.count(targets), by)
        if own.isnan().any():
            return  # there is no derivative to compare with
        gap, largest = float((own - ours).abs().max()), float(own.abs().max())
        if not gap <= torch.finfo(own.dtype).eps ** 0.5 * largest:
            raise NotExactError(
                "the parts of a batch must have the derivative of TRL's loss of all its rows, and "
                f"it differs by {gap / largest:.1e} of the largest: this version of trl, "
                f"{trl.__version__}, divides in another way than 1.16"
            )


class OneRank:
    """Accelerator with collectives that return the rows of this rank.

    A loss is computed once for each micro-batch, of which ranks may have different numbers.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        collective = name in ("gather", "gather_for_metrics", "reduce")
        return (lambda rows, *_, **__: rows) if collective else getattr(self._accelerator, name)


class Budget:
    """The arguments of an engine, stored before TRL's own `__init__`."""

    def __init__(
        self,
        *positional: Any,
        memory: float | str | None = None,
        micro_batch: int | None = None,
        rng: RngMode = "micro_batch",
        plan: Plan | None = None,
        **named: Any,
    ) -> None:
        self._options = {"memory": memory, "micro_batch": micro_batch, "rng": rng, "plan": plan}
        self._refuse_overrides()  # type: ignore[attr-defined]
        super().__init__(*positional, **named)
        self._refuse_untried(self._in_model())  # type: ignore[attr-defined]


class SFTTrainer(Budget, trl.SFTTrainer, BatchTrainer):  # type: ignore[misc]
    """TRL's `SFTTrainer`, with batches that fit in `memory` and the gradient of each undivided.

    It takes TRL's arguments, and `memory`, `micro_batch`, `rng` and `plan` as
    `anybatch.integrations.transformers.Trainer` does. The product of
    ``per_device_train_batch_size`` and ``gradient_accumulation_steps`` is one batch. Metrics are
    TRL's, of the full batch. The loss is divided by the tokens of the full batch. Packed and
    padding-free documents are rows, told apart by their positions.

    Raises:
        NotYetError: images, experts that are balanced, virtual tokens, several processes with a
            loss in which samples meet, ``activation_offloading``, ``compute_loss_func``,
            ``label_smoothing_factor``, and what `anybatch.integrations.transformers.Trainer`
            refuses.
        NotExactError: `compute_loss` is overridden; at the first step, the model does not tell
            packed documents apart.

    Example:
        >>> trainer = SFTTrainer(model, args, train_dataset=data, memory="8GiB")
        >>> trainer.train()
    """

    _separated: Any = None

    def _sum(self) -> tuple[str, Callable[[Rows], Any]] | None:
        return "tokens", lambda rows: (rows["labels"][:, 1:] != -100).sum().clamp(min=1)

    def get_train_dataloader(self) -> Any:
        """Return the loader; documents that TRL would join in one row are rows."""
        if not self.padding_free:
            return super().get_train_dataloader()
        before = self.data_collator
        self.data_collator = Documents(
            pad_token_id=before.pad_token_id,
            return_position_ids=True,
            pad_to_multiple_of=before.pad_to_multiple_of,
        )
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = before

    def _split(self, inputs: Rows) -> tuple[Rows, Any]:
        arguments, rows = super()._split(inputs)
        if self.padding_free:
            del arguments["attention_mask"]  # documents are told apart by their positions
            if self._separated is not self.model:
                self._separated = self.model if separates(self.model, arguments) else None
        return arguments, rows

    def _in_settings(self, args: Any) -> Iterator[Refusal]:
        yield from super()._in_settings(args)
        smoothing = args.label_smoothing_factor
        yield smoothing > 0, f"label_smoothing_factor={smoothing}", "set it to 0"

    def _in_model(self) -> Iterator[Refusal]:
        yield from super()._in_model()
        yield self.compute_loss_func is not None, "compute_loss_func", "leave it out"


class DPOTrainer(Budget, trl.DPOTrainer, BatchTrainer):  # type: ignore[misc]
    """TRL's `DPOTrainer`, with batches that fit in `memory` and the gradient of each undivided.

    As `SFTTrainer`; a sample is a pair. The reference (a model, or the policy without its adapter)
    runs on the same micro-batches. A ``loss_type`` that is a mean over pairs takes one pass; any
    other, such as ``"aot"``, which sorts the batch, is computed once on the log-probs of all pairs.

    Raises:
        NotYetError: as for `SFTTrainer`.
        NotExactError: `compute_loss` is overridden.
    """

    _pairs = True

    def _sum(self) -> tuple[str, Callable[[Rows], Any]] | None:
        return (
            ("pairs", lambda rows: len(rows["input_ids"]))
            if set(self.loss_types) <= PAIRWISE
            else None
        )


class GRPOTrainer(Budget, trl.GRPOTrainer, BatchTrainer):  # type: ignore[misc]
    """TRL's `GRPOTrainer`, with batches that fit in `memory` and the gradient of each undivided.

    As `SFTTrainer`; a sample is a completion. TRL generates and scores as always, so `memory` is
    the budget of training: all completions of a generation are generated at once, and scored
    in parts of ``per_device_train_batch_size``. The loss is that of all completions of a step,
    whatever its ``loss_type``; a quantile or a bonus of entropies takes two passes.

    Raises:
        NotYetError: as for `SFTTrainer`; ``use_vllm``; ``steps_per_generation`` that is no multiple
            of ``gradient_accumulation_steps``.
        NotExactError: `compute_loss` is overridden.
    """

    def _sum(self) -> tuple[str, Callable[[Rows], Any]] | None:
        if self._entropy_bonus_enabled or self.top_entropy_quantile < 1.0:
            return None
        return COUNTS.get(self.loss_type)

    def _in_settings(self, args: Any) -> Iterator[Refusal]:
        yield from super()._in_settings(args)
        times, steps = args.gradient_accumulation_steps, args.steps_per_generation
        yield args.use_vllm, "use_vllm=True", "set use_vllm=False"
        yield (
            steps % times,
            f"steps_per_generation={steps} with gradient_accumulation_steps={times}",
            "make the first a multiple of the second",
        )

    @property
    def _loaded_at_once(self) -> int:
        steps: int = self.args.steps_per_generation
        return self._train_batch_size * steps

    @contextmanager
    def _one_batch_a_step(self) -> Iterator[None]:
        args, times = self.args, self.args.gradient_accumulation_steps
        before = args.steps_per_generation
        args.steps_per_generation = before // times
        try:
            with super()._one_batch_a_step():
                yield
        finally:
            args.steps_per_generation = before

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        keep: int,
        batch_size: Any = None,
        **named: Any,
    ) -> Any:
        """Score completions in parts of the size that a device has in TRL."""
        if batch_size is not None and self.model.training:
            batch_size = max(1, batch_size // self._folded)
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, keep, batch_size, **named
        )
