"""`plan`: what a training step would do, hold and take, before any training.

Like a database's EXPLAIN: the decision the engine would make for a batch, with the sizes it would
not take and why. Nothing is left behind: gradients, buffers and dice are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anybatch._pace import Pace
from anybatch._plan import Plan
from anybatch._profile import pace_of, profile
from anybatch.batch import LazyBatch, TensorBatch
from anybatch.engine import BatchNormMode, Engine, RngMode
from anybatch.errors import BudgetError, NotYetError
from anybatch.loss.declared import Loss
from anybatch.norm.adaptive import Adaptive
from anybatch.ranks.crew import several
from anybatch.states.planned import away, plan_with_model, states_of

STEPS, ENOUGH = 20, 5.0
"""Steps of a loop that are measured at most, and seconds after which no further one is begun."""


def plan(
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | Loss | None,
    batch: Any,
    *,
    memory: int | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    micro_batch: int | None = None,
    batchnorm: BatchNormMode | Adaptive = "exact",
    rng: RngMode = "lane",
    timed: bool = True,
    states: Literal["host", "file"] | None = None,
    offload: str = "auto",
    spill: str | PathLike[str] | None = None,
    workspace: int | str | None = None,
    loader: Iterable[Any] | None = None,
) -> Plan:
    """Return the plan that an `Engine` would make for a batch, without training on it.

    The memory is foreseen by rehearsals on tensors without data, checked against one real step of
    two samples; the sizes that fit are timed on the device, a few micro-batches each. A model that
    FSDP has sharded is gathered for it, so there all ranks must call it.

    Args:
        model: as for `Engine`, and so are `loss_fn`, `memory`, `optimizer`, `micro_batch`,
            `batchnorm` and `rng`.
        loss_fn: the loss.
        batch: ``(inputs, targets)`` as for `Engine.backward`, or a `LazyBatch`.
        memory: bytes, or a text such as "6GiB"; None (default) is what is left on the device.
        optimizer: its state is counted as it will be after its first step.
        micro_batch: samples; None (default) chooses.
        batchnorm: as in `Engine`.
        rng: "lane" (default) or "batch".
        timed: time the sizes that fit. Default True; if False the plan takes the largest that
            fits.
        offload: "auto" (default) lets saved tensors leave the device where a micro-batch of one
            sample does not fit with them, and where larger micro-batches or lanes, or the
            undivided batch instead of lanes, have been timed to be faster so; "host" (from a GPU)
            or "file" in any case; "off" never. Without timing, the size is then the
            one of which the least leaves.
        states: where the optimizer's state waits between its steps, as `offload_states` does it:
            "host" memory from CUDA, a "file" on the CPU. Where a step does not fit with that, the
            parameters and gradients of the model leave too, and the plan says how many bytes of all
            of them are in memory; such a plan is obeyed inside ``with engine.states:``. Default
            None: they stay on the device.
        spill: folder of these files, which have no name and are gone with the process. Default
            None: the system's folder for temporary files.
        workspace: as in `Engine`: what one convolution may allocate so that it is faster. It
            counts; the plan says how each is divided, and one that is obeyed measures nothing.
        loader: of the training's mini-batches; a few steps of the loop with it are measured as
            `anybatch.profile` does it, and the plan tells the seconds of a step and of an epoch.
            It needs `optimizer`. Default None: the plan tells those of candidates only.

    Returns:
        The plan; give it to ``Engine(plan=...)`` to have it obeyed.

    Raises:
        BudgetError: a micro-batch of one sample does not fit, whatever leaves.
        StoreError: what leaves does not fit where it goes.
        AnybatchError: what `Engine.backward` would refuse.
        NotYetError: `loader` with `states`.
        ValueError: `batch` is neither a pair nor a `LazyBatch`; there is a `loader` and no
            `optimizer`; `offload`, `states` or `spill` is
            nothing here, or there is no optimizer whose state could leave; or as for `Engine`.

    Example:
        >>> print(anybatch.plan(model, loss_fn, (inputs, targets), memory="6GiB"))
    """
    if isinstance(batch, LazyBatch):
        inputs, targets = batch, None
    elif isinstance(batch, tuple) and len(batch) == 2:
        inputs, targets = batch
    else:
        raise ValueError(
            "batch must be a pair (inputs, targets), with None for no targets, or a LazyBatch, "
            f"and it is {type(batch).__name__}"
        )

    def foresee(*, timed: bool = timed) -> Plan:
        engine = Engine(
            model,
            loss_fn,
            optimizer=optimizer,
            memory=memory,
            micro_batch=micro_batch,
            batchnorm=batchnorm,
            rng=rng,
            workspace=workspace,
        )
        found = engine.foresee(inputs, targets, timed=timed, offload=offload, spill=spill)
        return found if loader is None else replace(found, pace=_pace(loader, engine, optimizer))

    _refuse(loader, optimizer, states)
    if states is None:
        return foresee()
    where = states_of(states, spill, optimizer, memory)
    assert optimizer is not None
    try:
        with away(where, optimizer):
            return replace(foresee(), states=where)
    except BudgetError as error:
        rows = inputs if isinstance(inputs, LazyBatch) else TensorBatch.of(inputs, targets)
        try:
            return plan_with_model(foresee, where, optimizer, model, rows.size)
        except BudgetError as least:
            raise least from error
        except NotYetError:  # over ranks
            raise error from None


def _refuse(
    loader: Iterable[Any] | None, optimizer: torch.optim.Optimizer | None, states: str | None
) -> None:
    if loader is not None and optimizer is None:
        raise ValueError(
            "a loader is given for the seconds of whole steps, and no optimizer that takes them: "
            "give optimizer="
        )
    if loader is not None and states is not None:
        raise NotYetError(
            "steps whose optimizer's state waits elsewhere are not measured today: leave loader or "
            "states out"
        )


def _pace(loader: Iterable[Any], engine: Engine, optimizer: torch.optim.Optimizer | None) -> Pace:
    """Measure a few steps of the loop, and put everything back."""
    assert optimizer is not None
    found = profile(loader, engine, optimizer, steps=STEPS, enough=inf if several() else ENOUGH)
    return pace_of(found, loader)
