"""`check`: test that a split mini-batch gives the gradients, buffers and loss of the full batch.

Exactness can be tested. A copy of the model runs one real batch undivided and split in several
ways, in float64, and every gradient, every buffer and the loss are compared by one measure
(`anybatch.tools.exactness`). Where they differ, or where the engine refuses, the report says in
words which samples meet, where, and which line to write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anybatch.core import pytree
from anybatch.core.batch import TensorBatch
from anybatch.core.modules import walk
from anybatch.core.norm import training_batchnorms
from anybatch.core.plan_sections import Evidence
from anybatch.core.rng import RNGState
from anybatch.engine.engine import Engine, RngMode
from anybatch.engine.rank_session import several
from anybatch.errors import AnybatchError, BatchError, NotYetError
from anybatch.loss.base import Loss
from anybatch.loss.contrastive import directions
from anybatch.loss.holders import Depth
from anybatch.loss.state import LossState
from anybatch.tools import diagnose
from anybatch.tools.diagnose import Finding, Report, Split
from anybatch.tools.exactness import error_of, tolerance

__all__ = ["Finding", "Report", "Split", "check"]

ROUNDING = {True: 1e-5, False: 1e-3}
"""Difference of two undivided runs, in float64 or not, above which it is no rounding."""

ISLAND = 1e-9
"""More than this is no rounding of float64: something computes in float32."""


def check(
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | Loss | None,
    batch: Any,
    targets: Any = None,
    *,
    micro_batch: int | None = None,
    rng: RngMode = "micro_batch",
) -> Report:
    """Compare the engine with the undivided batch, tensor by tensor, on a copy of the model.

    Args:
        model: any module; it is copied and not changed.
        loss_fn: as for `Engine`; a function that reads the model reads the copy here.
        batch: ``(inputs, targets)`` as for `Engine.backward`, copied too; a few samples are enough,
            more than one is needed. Or the inputs, if `targets` are passed.
        targets: as for `Engine.backward`. Default None: `batch` holds both.
        micro_batch: the size to check. None (default) checks 1, an even and a ragged split.
        rng: as for `Engine`. With "batch" every split draws the numbers of the undivided batch, so
            a model with dropout can be exact, and dropout is on; by default each draws its own.

    Returns:
        A `Report`; print it.

    Raises:
        BatchError: the batch holds one sample, cannot be split, or is not a pair.
        LossError: `loss_fn` is None, and the model returns no loss.
        NotYetError: there are several ranks.
        AnybatchError: the model or the loss cannot be copied.

    Example:
        >>> print(anybatch.check(model, nn.CrossEntropyLoss(), (inputs, targets)))
    """
    rng_state = RNGState.now()
    if targets is None and not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise BatchError(
            "a check needs inputs and targets, and it got one of them, a "
            f"{type(batch).__name__}: call check(model, loss_fn, (inputs, targets)), with None for "
            "targets that the loss does not take"
        )
    inputs, targets = batch if targets is None else (batch, targets)
    state = LossState(loss_fn.functions() if isinstance(loss_fn, Loss) else [loss_fn], model)
    restore = partial(state.restore, state.snapshot(Depth.THOROUGH))
    try:
        run = _Check(model, loss_fn, TensorBatch.of(inputs, targets), restore, rng)
        return run.report(micro_batch)
    finally:
        restore()
        rng_state.put_back()


@dataclass(frozen=True)
class _CheckRun:
    tensors: dict[str, Tensor]
    mechanism: str
    exact: Evidence


class _Check:
    """The copies, and the runs on them; before each, the state that is not copied is restored."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        batch: TensorBatch,
        restore: Callable[[], None],
        rng: RngMode,
    ) -> None:
        self._restore = restore
        if several():
            raise NotYetError(
                "a check compares with the full batch in one process, and there are several: run "
                "it before init_process_group, or in a process of its own"
            )
        if batch.size < 2:
            raise BatchError("a check must split the batch, and it holds one sample: give two")
        self.size, self.rng = batch.size, rng
        self.findings: list[Finding] = []
        self.changed: dict[str, None] = {}
        self.model, self.loss_fn = diagnose.copied(model, loss_fn)
        self.batch, self.dtype = _own(batch), "float64"
        off = [] if rng == "batch" else diagnose.silence_dropout(self.model)
        if off:
            self._find(f"dropout was switched off to compare ({', '.join(off[:4])})")
        self._widen()

    def _widen(self) -> None:
        original = self.model, self.loss_fn, self.batch
        self.model, self.loss_fn = diagnose.copied(self.model, self.loss_fn)
        try:
            self.batch = _own(self.batch, double=True)  # which a device may not have
            self.model.double()
            if isinstance(self.loss_fn, nn.Module):
                self.loss_fn.double()
            self.run(self.batch, self.size)
        except AnybatchError:
            raise
        except Exception as error:
            self.model, self.loss_fn, self.batch = original
            self.dtype = "the model's own precision"
            first = diagnose.first_line(error)
            self._find(f"the model does not run in float64 ({first}): compared as it is")

    def report(self, micro_batch: int | None) -> Report:
        """Run every split and return the report with its errors and findings."""
        truth = self.run(self.batch, self.size)
        finite = self._is_finite(truth)
        bound = self._bound(truth)
        if micro_batch is not None:
            Engine(self.model, self.loss_fn, micro_batch=micro_batch)  # a size that cannot be
        sizes = _sizes(self.size) if micro_batch is None else [micro_batch]
        splits = tuple(self._split(size, truth) for size in sizes)
        exact = finite and all(split.worst <= bound for split in splits)
        self._explain(splits, truth, exact=exact)
        return Report(exact, self.size, self.dtype, bound, splits, tuple(self.findings))

    def run(
        self, batch: TensorBatch, micro_batch: int, batchnorm: Any = "exact", scale: float = 1.0
    ) -> _CheckRun:
        """Return the gradients, buffers and loss of one step on a fresh copy.

        The loss is multiplied by `scale` for backward, and the gradients are divided by it.
        """
        model, loss_fn = diagnose.copied(self.model, self.loss_fn)
        batch = _own(batch)
        torch.manual_seed(0)
        self._restore()
        model.zero_grad(set_to_none=True)
        engine = Engine(model, loss_fn, micro_batch=micro_batch, batchnorm=batchnorm, rng=self.rng)
        scaler = None if scale == 1.0 else _Scale(scale)
        loss = engine.backward(batch.inputs, batch.targets, scaler=scaler)
        grads = {
            f"{n}.grad": p.grad / scale for n, p in model.named_parameters() if p.grad is not None
        }
        self.changed |= dict.fromkeys(engine._inputs.changed)
        buffers = {f"{n} (buffer)": b.clone() for n, b in model.named_buffers()}
        assert engine.plan is not None
        plan = engine.plan
        return _CheckRun({"loss": loss, **grads, **buffers}, plan.mechanism, plan.exact)

    def _is_finite(self, truth: _CheckRun) -> bool:
        """Say whether loss and gradients are; a buffer may hold infinities, as masks do."""
        bad = [
            name
            for name, tensor in truth.tensors.items()
            if not name.endswith("(buffer)") and not bool(tensor.to_dense().isfinite().all())
        ]
        if bad:
            self._find(
                f"the undivided batch itself gives NaN or infinite values ({', '.join(bad[:4])}): "
                "there is nothing to compare. Check a batch whose loss is finite"
            )
        return not bad

    def _bound(self, truth: _CheckRun) -> float:
        """Return the bound: ten times the largest difference between undivided runs.

        They differ in the order of the rows, or in the number that backward starts from, which
        shows the rounding of each row where the order of the rows does not.
        """
        limit, generator = ROUNDING[self.dtype == "float64"], torch.Generator().manual_seed(0)
        noise = 0.0
        for _ in range(2):
            order = torch.randperm(self.size, generator=generator)
            other = self.run(permuted(self.batch, order), self.size)
            noise = max(noise, *error_of(other.tensors, truth.tensors).values())
        if noise > limit:
            self._find("the result depends on the order of the rows: no noise was allowed for")
            noise = 0.0
        scaled = self.run(self.batch, self.size, scale=3.0)
        rounding = max(error_of(scaled.tensors, truth.tensors).values())
        noise = max(noise, rounding if rounding <= limit else 0.0)
        if self.dtype == "float64" and noise > ISLAND:
            self._find(
                f"a part of the model or of the loss computes in float32: undivided runs differ by "
                f"{noise:.1e}, which is rounding, and ten times that is the bound"
            )
        return tolerance({"undivided": noise})

    def _split(self, size: int, truth: _CheckRun) -> Split:
        try:
            run = self.run(self.batch, size)
        except AnybatchError as error:
            return Split(size, {}, str(error), "refused")
        except Exception as error:  # the undivided batch ran: it is the split that does not
            why = f"{type(error).__name__}: {diagnose.first_line(error)}"
            return Split(
                size, {}, f"model and loss do not run on parts of the batch ({why})", "refused"
            )
        if run.exact.state == "not shown":
            self._doubt(run.exact.by)
        return Split(size, error_of(run.tensors, truth.tensors), None, run.mechanism)

    def _doubt(self, why: str) -> None:
        """Record a finding, once, that exactness on other batches is not shown."""
        text = (
            f"these numbers agree, and that all batches do is not shown: {why}. Check a batch that "
            "takes the other ways through the model, too"
        )
        if all(finding.text != text for finding in self.findings):
            self._find(text)

    def _explain(self, splits: tuple[Split, ...], truth: _CheckRun, *, exact: bool) -> None:
        self._explain_loss(splits)
        model, batch = self.model, _own(self.batch)
        moved = diagnose.moved_buffers(model, batch)
        norms = training_batchnorms(walk(model))
        if any(split.mechanism == "lockstep" for split in splits):
            self._explain_lanes(norms)
        elif norms:
            self._explain_batchnorm(norms, splits, truth)
        elif moved:
            self._find(
                f"forward moves buffers ({', '.join(moved[:4])}): each micro-batch starts from "
                "the same values and must leave the same"
            )
        if exact:
            return
        if diagnose.draws(model, batch) and self.rng != "batch":
            self._find(
                "forward draws random numbers, and each split its own, all equally right: nothing "
                "more can be said of samples that meet. To compare the same draws, say so:",
                'anybatch.check(model, loss_fn, batch, rng="batch")',
            )
            return
        place = self._first_meeting(batch)
        if place:
            self._find(
                f"samples meet inside the model, first in {place}: its outputs for some rows "
                "depend on the other rows, so no split of the batch gives the same gradient"
            )
        reads = diagnose.value_reads(model, batch)
        if reads:
            self._find(
                f"forward reads values of tensors at {', '.join(reads[:3])}: what it decides for "
                "the full batch it may decide otherwise for a part (data-dependent control flow)"
            )

    def _first_meeting(self, batch: TensorBatch) -> str | None:
        try:
            return diagnose.first_meeting(self.model, batch)
        except Exception as error:
            first = diagnose.first_line(error)
            self._find(f"forward runs on the full batch and not on half of it ({first})")
            return None

    def _explain_loss(self, splits: tuple[Split, ...]) -> None:
        if self.changed:
            self._find(
                f"the loss changes state of its own ({', '.join(self.changed)}), so it is called "
                "once a step, on all outputs, which costs a second forward pass. A loss without "
                "state, or one whose state is changed between the steps, needs one"
            )
            return
        if not any(split.mechanism == "two-pass" for split in splits):
            return
        found = self._directions()
        if found:
            self._find(
                "each sample looks for its partner among all of the batch (InfoNCE): it is exact, "
                "and costs a second forward pass and similarities of all with all. Let the model "
                "return the two embeddings, and declare it:",
                f"loss_fn = anybatch.contrastive(temperature=..., symmetric={found > 1})",
            )
            return
        self._find(
            "the loss is not known to be a sum over samples (coupled): it is exact, and costs a "
            "second forward pass. If it is a mean over samples, declare it:",
            "loss_fn = anybatch.Loss.per_sample(lambda outputs, targets: ...)  # shape [n]",
        )

    def _directions(self) -> int:
        model, loss_fn = diagnose.copied(self.model, self.loss_fn)
        return 0 if isinstance(loss_fn, Loss) else directions(model, loss_fn, _own(self.batch))

    def _explain_lanes(self, norms: list[str]) -> None:
        self._find(
            f"{_meeting(norms)}: micro-batches wait for each other there, and the tensors of "
            "waiting ones are offloaded as far as they do not fit"
        )

    def _explain_batchnorm(
        self, norms: list[str], splits: tuple[Split, ...], truth: _CheckRun
    ) -> None:
        size, where = splits[-1].micro_batch, _meeting(norms)
        try:
            local = self.run(self.batch, size, "local")
        except Exception as error:
            first = diagnose.first_line(error)
            self._find(f"{where}, and micro-batches of {size} cannot be normalised alone ({first})")
            return
        errors = error_of(local.tensors, truth.tensors)
        worst = max(error for name, error in errors.items() if name.endswith(".grad"))
        self._find(
            f"{where}. Micro-batches of {size}, each normalised by itself, give a gradient error "
            f"of {worst:.2g}; to accept that, say so:",
            f'anybatch.Engine(model, loss_fn, micro_batch={size}, batchnorm="local")',
        )

    def _find(self, text: str, line: str | None = None) -> None:
        self.findings.append(Finding(text, line))


def _meeting(norms: list[str]) -> str:
    first = norms[0] if norms else "a call of batch_norm in forward"
    return f"samples meet in BatchNorm ({first}{' and more' if len(norms) > 1 else ''})"


def _sizes(size: int) -> list[int]:
    """Return micro-batches of 1, of half, and one with a smaller last micro-batch."""
    ragged = next((n for n in range(size // 2 + 1, size) if size % n), None)
    return sorted({1, -(-size // 2), *([ragged] if ragged else [])})


def _own(batch: TensorBatch, *, double: bool = False) -> TensorBatch:
    """Return the batch with tensors of its own: a step may write to them."""
    inputs = diagnose.cloned(batch.inputs, double=double)
    return TensorBatch(inputs, diagnose.cloned(batch.targets, double=double), batch.size)


def permuted(batch: TensorBatch, order: Tensor) -> TensorBatch:
    """Return the batch with its rows in another order."""

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.detach()[order.to(leaf.device)].requires_grad_(leaf.requires_grad)
        if isinstance(leaf, np.ndarray) and leaf.ndim > 0:
            return leaf[order.numpy()]
        strings = isinstance(leaf, list | tuple) and len(leaf) == batch.size
        return type(leaf)(leaf[i] for i in order.tolist()) if strings else leaf

    inputs, targets = (pytree.map_leaves(pick, values) for values in (batch.inputs, batch.targets))
    return TensorBatch(inputs, targets, batch.size)


class _Scale:
    """As much of a GradScaler as a step needs, at a fixed scale."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def scale(self, outputs: Tensor) -> Tensor:
        return outputs * self._factor
