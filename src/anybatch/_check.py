"""`check`: is the split batch the whole batch, for this model and this loss?

Nobody should have to believe it. A copy of the model runs one real batch undivided and split in
several ways, in float64, and every gradient, every buffer and the loss are compared by the measure
of Law 1 (`anybatch.exactness`). Where they differ, or where the engine refuses, the report says in
words what meets what, where, and which line to write.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anybatch import diagnose, tree
from anybatch.batch import TensorBatch
from anybatch.batchnorm import training_batchnorms
from anybatch.engine import Engine
from anybatch.errors import AnybatchError, BatchError, NotExactError
from anybatch.exactness import error_of, tolerance
from anybatch.loss.declared import Loss
from anybatch.modules import walk
from anybatch.rng import Dice

ROUNDING = {True: 1e-9, False: 1e-3}
"""What two orders of the rows may differ by, in float64 or not; more is no rounding."""


@dataclass(frozen=True)
class Split:
    """One way of splitting: the error of every tensor by name, or why it was refused."""

    micro_batch: int
    errors: dict[str, float]
    refused: str | None
    mechanism: str

    @property
    def worst(self) -> float:
        """The largest error; infinite where the split was refused."""
        return max(self.errors.values(), default=float("inf"))


@dataclass(frozen=True)
class Finding:
    """Something worth knowing: in words, and as the line to paste, where there is one."""

    text: str
    line: str | None = None


@dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        exact: every split gives the gradient of the undivided batch.
        samples: size of the batch.
        dtype: the precision of the comparison.
        bound: what errors must not exceed (Law 1).
        splits: one entry a micro-batch size.
        findings: what differs or costs, why, and what to do.
    """

    exact: bool
    samples: int
    dtype: str
    bound: float
    splits: tuple[Split, ...]
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        verdict = "exact" if self.exact else "NOT exact"
        lines = [f"{verdict}: {self.samples} samples, {self.dtype}, bound {self.bound:.1e}"]
        for split in self.splits:
            if split.refused is not None:
                lines.append(f"  micro-batch {split.micro_batch:>4}  refused: {split.refused}")
                continue
            name = max(split.errors, key=lambda key: split.errors[key])
            lines.append(
                f"  micro-batch {split.micro_batch:>4}  {split.mechanism:<10} "
                f"worst error {split.worst:.1e} ({name})"
            )
        for finding in self.findings:
            lines.append(f"  - {finding.text}")
            if finding.line:
                lines.append(f"      {finding.line}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        return json.dumps(asdict(self), indent=2)


def check(
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | Loss,
    batch: tuple[Any, Any],
    *,
    micro_batch: int | None = None,
) -> Report:
    """Compare the engine with the undivided batch, tensor by tensor, on a copy of the model.

    Args:
        model: any module; it is copied and not changed.
        loss_fn: as for `Engine`.
        batch: ``(inputs, targets)`` as for `Engine.backward`; a few samples are enough, more than
            one is needed.
        micro_batch: the size to check. None (default) checks 1, an even and a ragged split.

    Returns:
        A `Report`; print it.

    Raises:
        BatchError: the batch holds one sample, or cannot be split.
        LossError: the loss is not declared.

    Example:
        >>> print(anybatch.check(model, nn.CrossEntropyLoss(), (inputs, targets)))
    """
    dice = Dice.now()
    try:
        return _Check(model, loss_fn, TensorBatch.of(*batch)).report(micro_batch)
    finally:
        dice.put_back()


@dataclass(frozen=True)
class _Run:
    tensors: dict[str, Tensor]
    mechanism: str


class _Check:
    """The copies, and the runs on them."""

    def __init__(self, model: nn.Module, loss_fn: Any, batch: TensorBatch) -> None:
        if batch.size < 2:
            raise BatchError("a check must split the batch, and it holds one sample: give two")
        self.size = batch.size
        self.findings: list[Finding] = []
        self.model, self.loss_fn = copy.deepcopy(model), copy.deepcopy(loss_fn)
        self.batch, self.dtype = batch, "float64"
        off = diagnose.silence_dropout(self.model)
        if off:
            self._find(f"dropout was switched off to compare ({', '.join(off[:4])})")
        self._widen(batch)

    def _widen(self, batch: TensorBatch) -> None:
        narrow = self.model, self.loss_fn
        self.model = copy.deepcopy(self.model).double()
        if isinstance(self.loss_fn, nn.Module):
            self.loss_fn = copy.deepcopy(self.loss_fn).double()
        self.batch = TensorBatch(_double(batch.inputs), _double(batch.targets), batch.size)
        try:
            self.run(self.batch, batch.size)
        except AnybatchError:
            raise
        except Exception as error:
            self.model, self.loss_fn, self.batch = *narrow, batch
            self.dtype = "the model's own precision"
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._find(f"the model does not run in float64 ({first}): compared as it is")

    def report(self, micro_batch: int | None) -> Report:
        """Run every split and gather what it shows."""
        truth = self.run(self.batch, self.size)
        bound = self._bound(truth)
        sizes = [micro_batch] if micro_batch else _sizes(self.size)
        splits = tuple(self._split(size, truth) for size in sizes)
        exact = all(split.worst <= bound for split in splits)
        self._explain(splits, truth, exact=exact)
        return Report(exact, self.size, self.dtype, bound, splits, tuple(self.findings))

    def run(self, batch: TensorBatch, micro_batch: int, batchnorm: Any = "exact") -> _Run:
        """Return the gradients, buffers and loss of one step on a fresh copy."""
        model, loss_fn = copy.deepcopy(self.model), copy.deepcopy(self.loss_fn)
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        engine = Engine(model, loss_fn, micro_batch=micro_batch, batchnorm=batchnorm)
        loss = engine.backward(batch.inputs, batch.targets)
        grads = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
        buffers = {f"{n} (buffer)": b.clone() for n, b in model.named_buffers()}
        assert engine.plan is not None
        return _Run({"loss": loss, **grads, **buffers}, engine.plan.mechanism)

    def _bound(self, truth: _Run) -> float:
        """Return the bound of Law 1: the noise is that of two permutations of the rows."""
        noise = 0.0
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            order = torch.randperm(self.size, generator=generator)
            permuted = self.run(_permuted(self.batch, order), self.size)
            noise = max(noise, *error_of(permuted.tensors, truth.tensors).values())
        if noise > ROUNDING[self.dtype == "float64"]:
            self._find("the result depends on the order of the rows: no noise was allowed for")
            noise = 0.0
        return tolerance({"permuted": noise})

    def _split(self, size: int, truth: _Run) -> Split:
        try:
            run = self.run(self.batch, size)
        except NotExactError as error:
            return Split(size, {}, str(error), "refused")
        return Split(size, error_of(run.tensors, truth.tensors), None, run.mechanism)

    def _explain(self, splits: tuple[Split, ...], truth: _Run, *, exact: bool) -> None:
        self._explain_loss(splits)
        model, batch = self.model, self.batch
        moved = diagnose.moved_buffers(model, batch)
        norms = training_batchnorms(walk(model))
        if norms:
            self._explain_batchnorm(norms, splits, truth)
        elif moved:
            self._find(
                f"forward moves buffers ({', '.join(moved[:4])}): each micro-batch starts from "
                "the same values and must leave the same"
            )
        if exact:
            return
        if diagnose.draws(model, batch):
            self._find("forward draws random numbers: other splits draw others, all equally right")
        place = None if norms else diagnose.first_meeting(model, batch)
        if place:
            self._find(
                f"samples meet inside the model, first in {place}: its outputs for some rows "
                "depend on the other rows, so no split of the batch gives the same gradient"
            )
        reads = diagnose.value_reads(model, batch)
        if reads:
            self._find(
                f"forward reads values of tensors at {', '.join(reads[:3])}: what it decides for "
                "the whole batch it may decide otherwise for a part (data-dependent control flow)"
            )

    def _explain_loss(self, splits: tuple[Split, ...]) -> None:
        if not any(split.mechanism == "gathering" for split in splits):
            return
        self._find(
            "the loss is not known to be a sum over samples (coupled): it is exact, and costs a "
            "second forward pass. If it is a mean over samples, declare it:",
            "loss_fn = anybatch.Loss.per_sample(lambda outputs, targets: ...)  # shape [n]",
        )

    def _explain_batchnorm(self, norms: list[str], splits: tuple[Split, ...], truth: _Run) -> None:
        size = splits[-1].micro_batch
        local = self.run(self.batch, size, "local")
        errors = error_of(local.tensors, truth.tensors)
        worst = max(error for name, error in errors.items() if name.endswith(".grad"))
        self._find(
            f"samples meet in BatchNorm ({norms[0]}{' and more' if len(norms) > 1 else ''}). "
            f"Micro-batches of {size}, each normalised by itself, give a gradient error of "
            f"{worst:.2g}; to accept that, say so:",
            f'anybatch.Engine(model, loss_fn, micro_batch={size}, batchnorm="local")',
        )

    def _find(self, text: str, line: str | None = None) -> None:
        self.findings.append(Finding(text, line))


def _sizes(size: int) -> list[int]:
    """Return micro-batches of 1, of half, and one that leaves a ragged tail."""
    ragged = next((n for n in range(size // 2 + 1, size) if size % n), None)
    return sorted({1, -(-size // 2), *([ragged] if ragged else [])})


def _permuted(batch: TensorBatch, order: Tensor) -> TensorBatch:
    def pick(tensor: Tensor) -> Tensor:
        return tensor[order.to(tensor.device)] if tensor.dim() > 0 else tensor

    return TensorBatch(
        tree.map_tensors(pick, batch.inputs), tree.map_tensors(pick, batch.targets), batch.size
    )


def _double(values: Any) -> Any:
    return tree.map_tensors(lambda t: t.double() if t.is_floating_point() else t, values)
