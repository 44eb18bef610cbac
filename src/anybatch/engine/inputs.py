"""Inputs of a step in the mechanisms' form: batch, modules, leaf tensors, signature.

A user passes a model, a loss and perhaps an optimizer once, and trees of tensors at every step.
This module has the functions of these that need no state of the engine.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.utils.weak import TensorWeakRef

from anybatch.core.accelerators import require_generators
from anybatch.core.barrier import in_a_meeting
from anybatch.core.batch import Batch, LazyBatch, TensorBatch
from anybatch.core.modules import (
    Modules,
    Walked,
    first_parameter,
    in_training,
    is_spread,
    once,
    parameters,
    training_modes,
    walk,
)
from anybatch.core.norm import BatchStatisticsError, GatherError, training_batchnorms
from anybatch.core.plan import Plan
from anybatch.core.pytree import leaves
from anybatch.core.retry import Retry
from anybatch.core.units import parse_bytes, parse_share
from anybatch.distributed.fsdp import Sharded
from anybatch.engine.rank_session import several
from anybatch.errors import AnybatchError, BatchError, LossError, NotExactError, NotYetError
from anybatch.execution.signature import (
    Case,
    Reach,
    Signature,
    numbers_of,
    shapes_of,
    switched_on,
    tensor_signature,
)
from anybatch.lockstep.sync_batchnorm import Adaptive, Fixed
from anybatch.loss.base import Algorithm1, Loss
from anybatch.loss.calls import LossCalls
from anybatch.loss.state import LossState
from anybatch.memory.fakes import paged
from anybatch.planner.earlier_plans import run_plan_of
from anybatch.planner.forecast import OUTPUTS
from anybatch.planner.planner import RUNGS, Planner

OFTEN = 4
"""Walks in a row that found another model, after which none is stored."""

LOSS = "loss_fn: "
"""Prefix of the paths of the modules of the loss."""


@dataclass(frozen=True)
class StepInputs:
    """Inputs that are the same in every step.

    Attributes:
        model: the user's.
        loss: the loss.
        optimizer: the optimizer, or None.
        norms: chooses whether BatchNorm is "exact" or "local"; `now` is that of this step.
        closure: leaves that the loss closes over, found during steps.
        bare: batch normalisation kernels of forward that no module stands for, found on the way.
        gathers: calls of `anybatch.gather_batch` and `anybatch.coupled`, found on the way.
        reach: the largest rows so far of batches that are loaded on the way.
        rng: "micro_batch" or "batch": whose random draws a micro-batch makes.
        sharded: has gathered the model for the step; None for an unsharded one.
        changed: paths of the state for which the loss is called once a step, found on the way.
        outputs: the outputs of all samples are stored. Default False.
    """

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer | None
    norms: Fixed | Adaptive
    closure: list[TensorWeakRef] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)
    gathers: list[str] = field(default_factory=list)
    reach: Reach = field(default_factory=Reach)
    rng: str = "micro_batch"
    sharded: Sharded | None = None
    changed: list[str] = field(default_factory=list)
    outputs: bool = False
    _states: list[LossState] = field(default_factory=list)
    _walked: list[tuple[Modules, Walked]] = field(default_factory=list)
    _changed: list[int] = field(default_factory=lambda: [0])
    _rehearsed: list[bool] = field(default_factory=list)

    @property
    def state(self) -> LossState:
        """The places where the loss can have state."""
        if not self._states:
            self._states.append(LossState(self.loss.functions(), self.model))
        return self._states[0]

    def calls(self, *, first: bool) -> LossCalls | None:
        """Return the checker of loss state around the calls of a step; None without state.

        In the `first` step of a signature values are compared, and so is the loss with itself.
        Algorithm 1 to the letter calls its loss as often as there are micro-batches.
        """
        state = self.state
        needed = state or state.differentiates or (first and state.written_by_person)
        if isinstance(self.loss, Algorithm1) or not needed:
            return None
        rehearsed = bool(self._rehearsed)
        return LossCalls(state, self.changed, first=first, rehearsed=rehearsed)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        parameter = first_parameter(self.model)
        return torch.device("cpu") if parameter is None else parameter.device

    def batch(self, inputs: Any, targets: Any, *, several: bool = False) -> Batch:
        """Return the mini-batch of a step; `several`: one rank of several may have no samples."""
        if not isinstance(inputs, LazyBatch):
            if isinstance(inputs, Tensor) and not inputs.dim() and inputs.grad_fn is not None:
                raise BatchError(
                    "engine.backward calls the model and the loss itself, and it got a loss that "
                    "is computed already: engine.backward(inputs, targets), instead of the line "
                    "that computes the loss"
                )
            return TensorBatch.of(inputs, targets, least=0 if several else 1)
        if targets is not None:
            raise AnybatchError(
                "the targets of a LazyBatch must come from its items, and targets= was given too: "
                "return (input, target) from the data set and leave targets out"
            )
        inputs.paired = self.loss.takes_outputs
        return inputs

    def modules(self) -> Modules:
        """Return every module that a step runs: the model's, and those of the loss.

        Of those that the loss reaches without being one, such as a BatchNorm that a lambda closes
        over, only those with buffers. Where nothing has changed, it is the list of the last step.
        """
        state = self.state.current()
        more = [(path, module) for path, module in state.modules if module._buffers]
        if self._walked:
            were, walked = self._walked[0]
            if state is self._states[0] and more == were and walked.unchanged():
                self._changed[0] = 0
                return walked
        self._states[:] = [state]
        every = walk(self.model)
        for function in self.loss.functions():
            if isinstance(function, nn.Module):
                every += [(LOSS + path, module) for path, module in walk(function)]
        if more:
            there = {id(module) for _, module in every}
            every += [(LOSS + path, one) for path, one in more if id(one) not in there]
        self._walked.clear()
        if self._changed[0] < OFTEN:  # else to read all of them anew is lost time
            self._changed[0] += 1
            every = Walked(every)
            self._walked.append((more, every))
        return every

    def leaves(self, modules: Modules, batch: Batch) -> list[Tensor]:
        """Return every leaf that may receive a gradient, once."""
        # A leaf that forward makes is found, too: it must not outlive the step
        # (test_leaves_that_forward_makes_are_not_held_after_the_step).
        found = [leaf for held in self.closure if (leaf := held()) is not None]
        self.closure[:] = map(TensorWeakRef, found)
        every = parameters(modules) + found
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                every += group["params"]
        every += self.rows_leaves(batch)
        every += self.shards
        return list(dict(zip(map(id, every), every, strict=True)).values())

    @property
    def shards(self) -> list[Tensor]:
        """During a step, the parameters that persist when a model is sharded again."""
        return [] if self.sharded is None else self.sharded.shards

    def rows_leaves(self, batch: Batch) -> list[Tensor]:
        """Return the tensors of a batch that receive a gradient themselves."""
        return list(batch.trained) if isinstance(batch, TensorBatch) else []

    def meets(self, modules: Modules) -> list[str]:
        """Return the names of the layers where samples meet, so that micro-batches need lanes."""
        if self.norms.now != "exact":
            return []
        found = once(training_batchnorms, modules)
        if found:
            found = [name for name in found if not name.startswith(LOSS)]
        bare = self.bare and any(
            in_training(module) for path, module in modules if not path.startswith(LOSS)
        )
        return self.gathers + (self.bare if bare else []) + found

    def signature(self, batch: Batch, modules: Modules, *, trains: bool, before: int) -> Signature:
        """Return the signature of a plan for a step.

        Args:
            batch: of the step; of a lazy one a few rows are loaded, once.
            modules: every module that it runs.
            trains: with backward.
            before: bytes of gradients that are there.
        """
        rows = self.rows(batch)
        every = [p for _, module in modules for p in module._parameters.values() if p is not None]
        modes = (
            isinstance(batch, TensorBatch),
            once(training_modes, modules),
            tuple([p.requires_grad for p in every]),
            switched_on(self.optimizer),
            paged().limit,
        )
        shapes, numbers = shapes_of(rows), numbers_of(rows)
        lanes = bool(self.meets(modules))
        return Signature(
            tensor_signature(rows), modes, numbers, lanes, trains, shapes, batch.size, before
        )

    def rows(self, batch: Batch) -> TensorBatch:
        """Return the rows that a step is planned with."""
        if isinstance(batch, TensorBatch):
            return batch
        assert isinstance(batch, LazyBatch)
        return self.reach.rows(batch)

    def case(self, batch: Batch, modules: Modules, *, trains: bool) -> Case:
        """Return the case of a step, for its dry run."""
        self._rehearsed[:] = [True]
        held, every = paged(), self.leaves(modules, _NOTHING)
        return Case(
            model=self.model,
            loss=self.loss,
            rows=self.rows(batch),
            size=batch.size,
            lazy=not isinstance(batch, TensorBatch),
            modules=modules,
            leaves=[leaf for leaf in every if not (is_lazy(leaf) or is_spread(leaf))],
            device=self.device,
            batchnorm=self.norms.now,
            trains=trains,
            lanes=bool(self.meets(modules)),
            draws=self.rng == "batch",
            sharded=self.sharded,
            paged=held.ids(every),
            page_bytes=held.limit,
            state=self.state,
            outputs=self.outputs,
        )


_NOTHING = TensorBatch(None, None, 0)


class Detecting:
    """Context that records batch normalisation that no module stands for; the step begins again.

    Raises:
        Retry: it was found in the body.
    """

    def __init__(self, inputs: StepInputs) -> None:
        self._inputs = inputs

    def __enter__(self) -> None: ...

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, BatchStatisticsError):
            return
        inputs = self._inputs
        found = inputs.gathers if isinstance(error, GatherError) else inputs.bare
        if found or inputs.norms.now != "exact":
            return
        call = error.call if isinstance(error, GatherError) else "a call of batch_norm in forward"
        found.append(call)
        raise Retry("meeting") from error


# Refusals of invalid arguments and steps: each error names the rule, the value and the fix.


def refuse_now(
    model: Any, micro_batch: Any, batchnorm: Any, rng: str, tune: str, rungs: Any
) -> None:
    """Refuse arguments that mean nothing."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, and it is {type(model).__name__}")
    integer = isinstance(micro_batch, int) and not isinstance(micro_batch, bool)
    if micro_batch is not None and (not integer or micro_batch < 1):
        raise ValueError(
            f"micro_batch must be a whole number >= 1, and it is {micro_batch!r}: leave it out and "
            'give memory="6GiB", and the fastest size that fits is found'
        )
    if batchnorm not in ("exact", "local", "adaptive") and not isinstance(batchnorm, Adaptive):
        raise ValueError(
            'batchnorm must be "exact", "local", "adaptive" or an anybatch.Adaptive, and it is '
            f"{batchnorm!r}"
        )
    if rng not in ("micro_batch", "batch"):
        raise ValueError(f'rng must be "micro_batch" or "batch", and it is {rng!r}')
    if tune not in ("steps", "off"):
        raise ValueError(f'tune must be "steps" or "off", and it is {tune!r}')
    refuse_rungs(rungs)


def refuse_rungs(rungs: Any) -> None:
    """Refuse anything but some of `RUNGS`."""
    every = isinstance(rungs, Collection) and not isinstance(rungs, str | bytes)
    if not every or any(one not in RUNGS for one in rungs):
        raise ValueError(f"rungs must be a collection of some of {RUNGS}, and it is {rungs!r}")


def as_function(loss_fn: Any) -> Callable[..., Tensor]:
    """Return `loss_fn`, which must be one that can be called."""
    if not callable(loss_fn):
        raise TypeError(
            "loss_fn must be a function of (outputs, targets) or an anybatch.Loss, and it is "
            f"{type(loss_fn).__name__}"
        )
    checked: Callable[..., Tensor] = loss_fn
    return checked


def refuse_nested(code: CodeType) -> None:
    """Refuse a step that begins inside another one, in its observer for instance.

    The stack is searched: a flag would remain set after an interrupt at the wrong instruction.

    Args:
        code: that of the calling method.
    """
    inside = in_a_meeting()
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is code or inside:
            raise AnybatchError(
                "a step must end before another one begins, and engine.backward was called inside "
                "engine.backward, most likely by observe: store its inputs and call it afterwards"
            )
        frame = frame.f_back


def versions_of(leaves: list[Tensor]) -> list[int]:
    """Return torch's count of the writes to each leaf that has data yet."""
    if UninitializedParameter in map(type, leaves):
        leaves = [leaf for leaf in leaves if type(leaf) is not UninitializedParameter]
    try:
        return [*map(attrgetter("_version"), leaves)]
    except RuntimeError:  # of one that was made in inference mode
        return [0 if leaf.is_inference() else leaf._version for leaf in leaves]


def refuse_written(leaves: list[Tensor], versions: list[int]) -> None:
    """Refuse a step that wrote to a parameter: later micro-batches used another model.

    The write cannot be undone here: no copy of the parameters exists.
    """
    if versions_of(leaves) == versions:
        return
    if len(versions) == len(leaves):  # else lazy parameters have been made on the way
        changed = [
            p for p, before in zip(leaves, versions, strict=True) if versions_of([p]) != [before]
        ]
        raise NotExactError(
            f"parameters must not change before the full batch is done, and {len(changed)} of them "
            f"were written to during the step, the first of shape {tuple(changed[0].shape)}, by a "
            "gradient hook, by forward or by the loss; these writes were not undone. Update them "
            "after engine.backward; make a tensor that the loss itself updates a buffer, or a "
            "parameter with requires_grad=False"
        )


def refuse_place(device: torch.device, *, outside: bool) -> None:
    """Refuse a step with parameters resident against its plan, or offloaded over ranks.

    Args:
        device: of the model; it must have random generators that can be stored.
        outside: the plan offloads them, and the step is outside of that context.
    """
    require_generators(device)
    if outside:
        raise ValueError(
            "a plan that offloads parameters needs a training inside `with engine.states:`, and "
            "this step is outside: put that around the whole training"
        )
    if paged().every and several():
        raise NotYetError(
            "parameters cannot be offloaded over several ranks today: offload only the "
            "optimizer's state (offload_states without model=), or shard the parameters over the "
            "ranks (FSDP2)"
        )


# Errors of a call, in one sentence with the line to write, and without frames of this package.

PACKAGE = str(Path(__file__).parents[1])
FULL = "ANYBATCH_TRACEBACK"
"""Environment variable; "full" shows the frames of this package in every error."""


def error_of_call(
    error: Exception, inputs: StepInputs, batch: Any, targets: Any
) -> AnybatchError | None:
    """Return the error that names a wrong argument of a call; None where the step's own says more.

    Args:
        error: the step's; it loses the frames of this package.
        inputs: of the engine.
        batch: the `inputs` of the call.
        targets: those of the call.
    """
    without_own_frames(error)
    return _wrong_call(str(error), inputs, batch, targets) if type(error) is TypeError else None


def without_own_frames(error: Exception) -> None:
    """Remove frames of this package from an error, and from those that caused it.

    One that arises in this package, and is none of its errors, is a fault of ours and remains.
    """
    done, one = set[int](), error
    while isinstance(one, BaseException) and id(one) not in done:
        done.add(id(one))
        trace = [tb for tb in _frames(one) if not _is_own(tb)]
        own = isinstance(one, AnybatchError)
        if os.environ.get(FULL) != "full" and (own or _is_of_others(one)):
            found: TracebackType | None = None
            for tb in reversed(trace):
                found = TracebackType(found, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
            one.__traceback__ = found
        one = one.__cause__ or one.__context__  # type: ignore[assignment]


def _frames(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_own(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(PACKAGE)


def _is_of_others(error: BaseException) -> bool:
    """Say whether code outside of this package was called by it, and has raised."""
    own = list(map(_is_own, _frames(error)))
    return True in own and not all(own[own.index(True) :])


def _wrong_call(text: str, inputs: StepInputs, batch: Any, targets: Any) -> AnybatchError | None:
    """Return the error of a batch that the model or the loss does not take; None if they do.

    Args:
        text: of a TypeError. Python names the function whose arguments it refuses: any other error
            has arisen inside of one.
        inputs: of the engine.
        batch: the `inputs` of the call.
        targets: those of the call.
    """
    if isinstance(batch, LazyBatch):
        return None
    function = next(iter(inputs.loss.functions()), None)
    form = function.forward if isinstance(function, nn.Module) else function
    if _refuses(inputs.model.forward, text):
        return BatchError(_of_model(inputs.model, batch, targets))
    if inputs.loss.takes_outputs and _refuses(form, text):
        return LossError(_of_loss(form, targets))
    named = {"inputs": batch, "targets": targets}
    every = (pair for name, tree in named.items() for pair in leaves(tree, name))
    arrays = [path for path, leaf in every if isinstance(leaf, np.ndarray)]
    if arrays and "numpy.ndarray" in text:
        return BatchError(
            f"a batch must be made of tensors where the model computes with them, and {arrays[0]} "
            f"is a numpy array: pass torch.from_numpy({arrays[0]})"
        )
    return None


def _refuses(function: Any, text: str) -> bool:
    """Say whether a TypeError is that of a call of `function` with other arguments."""
    return text.startswith(f"{getattr(function, '__qualname__', None)}()")


def no_attribute(name: str) -> str:
    """Return the error's text for an attribute that an engine lacks."""
    sentence = f"'Engine' object has no attribute {name!r}"
    of_optimizer = {"step": "optimizer.step()", "zero_grad": "optimizer.zero_grad()"}
    if name in of_optimizer:
        return f"{sentence}: the optimizer is your own: {of_optimizer[name]}"
    if name == "outputs":
        return f"{sentence}: Engine(..., keep_outputs=True) keeps them, and counts their memory"
    if hasattr(nn.Module, name):
        return f"{sentence}: the model is your own: engine.model.{name}(...)"
    return sentence


def _of_model(model: nn.Module, batch: Any, targets: Any) -> str:
    took = f"{type(model).__name__}.forward{inspect.signature(model.forward)}"
    several = isinstance(batch, tuple | list) and not hasattr(batch, "_fields")
    if isinstance(batch, Mapping):
        passed = ", ".join(f"{name}=..." for name in batch)
        mend = "select what it takes, and pass what the loss takes as targets: engine.backward("
        mend += "{'x': batch['x']}, batch['y'])"
    else:
        count = len(batch) if several else 1
        passed = f"{count} argument{'s' * (count != 1)}"
        mend = "put several inputs into a tuple: engine.backward((a, b), targets)"
        if count > 1:
            mend = "pass the targets after the inputs: engine.backward(inputs, targets)"
            mend += "" if targets is not None else ", or engine.backward(*batch)"
    return (
        "a model must take its inputs (a tensor as model(x), a tuple as model(*x), a mapping as "
        f"model(**x)), and {took} was called with {passed}: {mend}"
    )


def _of_loss(function: Any, targets: Any) -> str:
    passed = "(outputs)" if targets is None else "(outputs, targets)"
    mend = "pass targets: engine.backward(inputs, targets)"
    if targets is not None:
        mend = "close over everything else: lambda outputs, targets: ..."
    return (
        f"a loss is called as loss_fn{passed}, or with the items of a tuple of outputs one by one, "
        f"and {function.__qualname__}{inspect.signature(function)} takes others: {mend}"
    )


def planner_of(
    memory: Any,
    micro_batch: int | None,
    plan: Plan | None,
    workspace: Any = None,
    tune: str = "steps",
    rungs: Collection[str] = RUNGS,
    *,
    outputs: bool = False,
) -> Planner | None:
    """Return the planner for the arguments of an engine; None where nothing is to be planned.

    Raises:
        TypeError: `plan` is no plan.
        ValueError: a plan and something that it decides.
    """
    if plan is not None:
        if not isinstance(plan, Plan):
            raise TypeError(
                f"plan must be an anybatch.Plan, and it is {type(plan).__name__}: "
                "Plan.from_json(text) makes one of a file's text"
            )
        if memory is not None or micro_batch is not None or workspace is not None:
            raise ValueError(
                "a plan decides memory, micro_batch and workspace, and one of them was given with "
                "it: leave them out, or leave plan out"
            )
        chunked, tile = (plan.memory.chunked, plan.memory.tile) if plan.memory else (0, 0)
        used = {"chunks": chunked, "tiles": tile, "offload": plan.offload}
        barred = [name for name, planned in used.items() if planned and name not in rungs]
        if barred:
            raise ValueError(
                f"a plan decides about chunks, tiles and offloading: it uses {barred[0]}, and "
                f"rungs={rungs!r} forbids that: leave rungs out, or make another plan"
            )
        if plan.memory is None:
            return None
        if outputs and OUTPUTS not in dict(plan.memory.owners):
            raise ValueError(
                "a plan must count the outputs that are kept, and this one counts none: make it by "
                "Engine(..., keep_outputs=True).foresee(inputs, targets), or leave keep_outputs out"
            )
        return Planner(plan.memory.budget, settled=run_plan_of(plan), rungs=rungs)
    if memory is None and micro_batch is not None:
        return None
    share = parse_share(memory)
    budget = None if memory is None or share else parse_bytes(memory, word="80%")
    return Planner(budget, fixed=micro_batch, timed=tune == "steps", rungs=rungs, share=share)
