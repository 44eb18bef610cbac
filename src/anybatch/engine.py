"""`Engine`: a person's training step, for a batch of any size, in micro-batches.

The engine owns no model, no optimizer and no loop. It takes the two lines that do not survive a
batch that is too big, ``loss = loss_fn(model(x), y); loss.backward()``, and does them in parts,
with the gradient of the whole. Everything around them stays the person's own.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anybatch import graph, tree
from anybatch._plan import Facts, Plan, decide
from anybatch.batch import Batch, LazyBatch, TensorBatch
from anybatch.batchnorm import refuse, running_statistics, training_batchnorms
from anybatch.buffers import ForwardBuffers
from anybatch.device import Link, link_to
from anybatch.errors import AnybatchError
from anybatch.gather import COUPLED, gather
from anybatch.gradients import Gradients
from anybatch.look import look
from anybatch.loss.declared import Inside, Loss
from anybatch.loss.watched import Watched
from anybatch.modules import Modules, parameters, walk
from anybatch.records import Seen, StepReport
from anybatch.refusals import (
    as_function,
    refuse_later,
    refuse_nested,
    refuse_now,
    refuse_ranks,
    refuse_written,
    versions_of,
)
from anybatch.step import Observer, OutputsChangedError, Scaler, Step
from anybatch.stream import stream
from anybatch.undivided import undivided
from anybatch.undo import Before, no_optimizer_step, whole_or_nothing

BatchNormMode = Literal["exact", "local"]

LOSS = "loss_fn: "
"""What the paths of the modules of the loss begin with."""


class Engine:
    """Train a model at any batch size with the gradient of the whole batch.

    After `backward`, ``.grad`` of every parameter holds what
    ``loss_fn(model(inputs), targets).backward()`` on the undivided batch would have added, up to
    rounding.

    Args:
        model: any module. It stays where and as it is.
        loss_fn: ``loss_fn(outputs, targets)`` -> 0-dim tensor, or a `Loss`. torch's own losses and
            sums of them need one pass; any other function is exact too, with a second forward.
            None is refused: a loss inside the model is declared by `Loss.inside`.
        optimizer: the optimizer, if there is one. Its parameters count as trained too.
        memory: reserved for the memory budget; not yet.
        micro_batch: samples in a micro-batch, at least 1.
        batchnorm: "exact" (default) refuses BatchNorm in training mode when the batch is split;
            "local" lets each micro-batch be normalised by its own statistics, which is another
            function than that of the batch.
        rng: "lane" (default): each micro-batch draws its own random numbers, in order.
        plan: reserved for a plan made before; not yet.

    Raises:
        NotYetError: `memory`, `plan`, ``rng="batch"`` or a missing `micro_batch`.
        LossError: `loss_fn` is None.
        ValueError: `micro_batch` or `batchnorm` is not one of what is said above.

    Example:
        >>> engine = anybatch.Engine(model, nn.CrossEntropyLoss(), micro_batch=64)
        >>> for inputs, targets in loader:
        ...     optimizer.zero_grad()
        ...     loss = engine.backward(inputs, targets)
        ...     optimizer.step()

    Source: MBS, Algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor] | Loss | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        memory: int | str | None = None,
        micro_batch: int | None = None,
        batchnorm: BatchNormMode = "exact",
        rng: Literal["lane", "batch"] = "lane",
        plan: Plan | None = None,
    ) -> None:
        refuse_later(memory, plan, rng, micro_batch)
        assert micro_batch is not None
        refuse_now(model, loss_fn, micro_batch, batchnorm)
        self.model = model
        self.optimizer = optimizer
        self.loss = loss_fn if isinstance(loss_fn, Loss) else Watched(as_function(loss_fn))
        self.micro_batch = micro_batch
        self.batchnorm = batchnorm
        self._plan: Plan | None = None
        self._last: StepReport | None = None
        self._facts: Facts | None = None
        self._link: tuple[torch.device, Link] | None = None
        self._seen: dict[Any, Seen] = {}
        self._closure: list[Tensor] = []

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step; None before the first one."""
        return self._plan

    @property
    def last(self) -> StepReport | None:
        """What the last step was; None before the first one."""
        return self._last

    def backward(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        scaler: Scaler | None = None,
        observe: Observer | None = None,
    ) -> Tensor:
        """Add the gradient of the whole batch to ``.grad``, and return its loss.

        Args:
            inputs: tree of tensors of shape [N_B, ...]: a tensor is passed as ``model(x)``, a tuple
                or list as ``model(*x)``, a mapping as ``model(**x)``. Or a `LazyBatch`.
            targets: any tree of tensors [N_B, ...], sliced alike; None calls
                ``loss_fn(outputs)``.
            scaler: ``torch.amp.GradScaler``; the gradients are then scaled, the loss is not.
            observe: called ``observe(outputs, targets)`` for each micro-batch, once, in order, with
                detached tensors.

        Returns:
            The loss of the whole batch, a detached 0-dim tensor.

        Raises:
            BatchError: the leaves do not share a first dimension; each is named.
            NotExactError: the gradient of the whole batch cannot be had this way.
            LossError: the loss does not do what it must.

        Nothing has changed after an exception, KeyboardInterrupt included.
        """
        start = perf_counter()
        refuse_nested(BACKWARD)
        batch, modules = self._batch(inputs, targets), self._modules()
        leaves = self._parameters(modules, batch)
        before = Before(modules, leaves)
        versions = versions_of(leaves)
        gradients = Gradients(leaves, wide=batch.size > self.micro_batch)
        step = self._step(batch, modules, before, gradients)
        step.scaler, step.observe = scaler, observe
        with whole_or_nothing(before, gradients.deliver):
            gradients.set_aside()
            with no_optimizer_step(before), torch.enable_grad():
                loss = self._run(step, before)
            refuse_written(leaves, versions)
        return self._note(step, loss, perf_counter() - start)

    def evaluate(
        self, inputs: Any, targets: Any = None, *, observe: Observer | None = None
    ) -> Tensor:
        """Return the loss of the whole batch without gradients, one micro-batch at a time.

        The model is used in the mode it is in: call ``model.eval()`` before.

        Args:
            inputs: as in `backward`.
            targets: as in `backward`.
            observe: as in `backward`.

        Returns:
            The loss of the whole batch, a detached 0-dim tensor.

        Raises:
            BatchError: as in `backward`.
            NotExactError: as in `backward`.
        """
        start = perf_counter()
        batch, modules = self._batch(inputs, targets), self._modules()
        before = Before(modules, [])
        step = self._step(batch, modules, before, None)
        step.observe = observe
        with whole_or_nothing(before, lambda: None), torch.no_grad():
            loss = self._run(step, before)
            step.forget_casts()
        return self._note(step, loss, perf_counter() - start)

    def _run(self, step: Step, before: Before) -> Tensor:
        return undivided(step) if step.count == 1 else self._divided(step, before)

    def _divided(self, step: Step, before: Before) -> Tensor:
        """Stream, unless the loss couples the samples: that is known, or found out on the way."""
        seen = self._seen.get(step.signature)
        if seen is None:
            look(step)
            step.discover = self._discoverer(step, before)
        try:
            return self._streamed_or_gathered(step, before, seen)
        except OutputsChangedError:
            if seen is None:
                raise
        del self._seen[step.signature]
        before.dice.put_back()
        step.restart()
        return self._divided(step, before)

    def _streamed_or_gathered(self, step: Step, before: Before, seen: Seen | None) -> Tensor:
        loss = None if seen is not None and seen.coupled else stream(step)
        if loss is None:
            before.dice.put_back()
            step.restart()
            loss = gather(step)
        moving = step.buffers.moving if seen is None else seen.moving | step.buffers.moving
        self._seen[step.signature] = Seen(step.found == COUPLED, moving, step.layout, step.copies)
        return loss

    def _step(
        self, batch: Batch, modules: Modules, before: Before, gradients: Gradients | None
    ) -> Step:
        split = batch.size > self.micro_batch
        of_model = [(path, module) for path, module in modules if not path.startswith(LOSS)]
        norms = training_batchnorms(of_model) if split else []
        if self.batchnorm == "exact":
            refuse(norms)
        signature = (*self._signature(batch, modules), gradients is None)
        seen = self._seen.get(signature)
        return Step(
            model=self.model,
            loss=self.loss,
            batch=batch,
            micro_batch=self.micro_batch,
            link=self._link_to_model(),
            buffers=ForwardBuffers(
                [b for b in before.buffers if split and not b.path.startswith(LOSS)],
                running_statistics(of_model) if self.batchnorm == "local" else set(),
                seen.moving if seen else None,
            ),
            gradients=gradients,
            signature=signature,
            layout=seen.layout if seen else None,
            copies=seen.copies if seen else False,
            batchnorm=self.batchnorm,
            local=len(norms),
        )

    def _discoverer(self, step: Step, before: Before) -> Callable[[list[Tensor]], None]:
        """Return what adds the leaves that only the graph knows, such as a closure's parameters."""

        def discover(roots: list[Tensor]) -> None:
            if step.gradients is None:
                return
            known = {id(leaf) for leaf in step.gradients.parameters} | step.own
            found = [leaf for leaf in graph.leaves(roots) if id(leaf) not in known]
            before.add(found)
            step.gradients.add(found)
            self._closure.extend(found)

        return discover

    def _batch(self, inputs: Any, targets: Any) -> Batch:
        refuse_ranks()
        if not isinstance(inputs, LazyBatch):
            return TensorBatch.of(inputs, targets)
        if targets is not None:
            raise AnybatchError(
                "the targets of a LazyBatch must come from its items, and targets= was given too: "
                "return (input, target) from the data set and leave targets out"
            )
        inputs.paired = not isinstance(self.loss, Inside)
        return inputs

    def _parameters(self, modules: Modules, batch: Batch) -> list[Tensor]:
        """Return every leaf that may receive a gradient, once."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        given = [] if not isinstance(batch, TensorBatch) else [batch.inputs, batch.targets]
        every = [
            *parameters(modules),
            *self._closure,
            *(p for group in groups for p in group["params"]),
            *(leaf for _, leaf in tree.tensors(given) if leaf.requires_grad),
        ]
        return list({id(p): p for p in every}.values())

    def _modules(self) -> Modules:
        """Return every module that a step runs: the model's, and those of the loss."""
        of_loss = [fn for fn in self.loss.functions() if isinstance(fn, nn.Module)]
        return walk(self.model) + [(LOSS + p, m) for fn in of_loss for p, m in walk(fn)]

    def _link_to_model(self) -> Link:
        parameter = next(self.model.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        if self._link is None or self._link[0] != device:
            self._link = (device, link_to(device))
        return self._link[1]

    def _signature(self, batch: Batch, modules: Modules) -> tuple[Any, ...]:
        kinds: tuple[Any, ...] = ("lazy",)
        if isinstance(batch, TensorBatch):
            pair = (batch.inputs, batch.targets)
            kinds = tuple((path, t.dim(), t.dtype) for path, t in tree.tensors(pair))
        return kinds, tuple(module.training for _, module in modules)

    def _note(self, step: Step, loss: Tensor, seconds: float) -> Tensor:
        gradients = step.gradients
        facts = Facts(
            micro_batch=self.micro_batch,
            divided=step.count > 1,
            loss=step.found,
            coupled=step.found == COUPLED,
            late=isinstance(step.batch, LazyBatch),
            half=gradients.half if gradients is not None else (),
            before=gradients is not None and gradients.added,
            local=step.local,
        )
        # A last partial batch that needs no splitting does not change the plan of the others.
        if facts != self._facts and (facts.divided or self._plan is None):
            self._facts, self._plan = facts, decide(facts)
        peak = torch.cuda.max_memory_allocated() if loss.is_cuda else None
        self._last = StepReport(loss, step.batch.size, self.micro_batch, step.count, seconds, peak)
        return loss


BACKWARD = Engine.backward.__code__
"""How a step is known on the stack, whoever may wrap the method later."""
