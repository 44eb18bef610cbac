"""Ranks that share the batch of an engine: a single process, or a process group.

Under ``torchrun`` nothing is declared: where a process group is there, the batch is that of all of
its ranks. A model in DistributedDataParallel is unwrapped, because its reducer would average the
gradient of each rank's last micro-batch; its process group is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.core.retry import Retry
from anybatch.distributed.coordinator import Coordinator, Scripts, guarded
from anybatch.distributed.fsdp import Sharded, coordinated
from anybatch.distributed.global_batch import Ranks, devices_of, same_rng
from anybatch.distributed.handshake import Alike, Form, Here, Named, has_lazy, values_of
from anybatch.distributed.local_batch import Amended, LocalBatch
from anybatch.distributed.process_group import Group, group_of
from anybatch.errors import NotExactError, RankError
from anybatch.lockstep.sync_batchnorm import meeting_layers, plain

T = TypeVar("T")


def unwrapped(model: nn.Module) -> tuple[nn.Module, Any]:
    """Return the model without DistributedDataParallel, and the process group of that or None.

    Raises:
        NotExactError: a part of the model is in it, whose reducer would wait for other ranks in
            every micro-batch, and average its gradients.
    """
    if isinstance(model, DistributedDataParallel):
        return unwrapped(model.module)[0], model.process_group
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise NotExactError(
                "DistributedDataParallel must wrap the full model of an engine, which unwraps it, "
                f"and it wraps {path} inside of the model: pass the unwrapped module (its .module, "
                "accelerator.unwrap_model), since the engine sums gradients over ranks itself"
            )
    return model, None


class RankSession:
    """The ranks of an engine, from step to step.

    Args:
        model: the user's, without DistributedDataParallel.
        handle: their process group; None is the one of all ranks, if there is one.
        adaptive: BatchNorm is chosen at every step, by how many samples there are.
        shared_rng: every step begins with the RNG state of rank 0.
        sharded: gathers the model for a step; None (default) for an unsharded one.

    Attributes:
        global_batch: the batch of the present step, over all ranks.
        several: the present step has others.
    """

    def __init__(
        self,
        model: nn.Module,
        handle: Any,
        *,
        adaptive: bool,
        shared_rng: bool = False,
        sharded: Sharded | None = None,
    ) -> None:
        self.global_batch: LocalBatch = LocalBatch()
        self._handle, self._model = None if _is_all(handle) else handle, model
        self._adaptive, self._shared_rng = adaptive, shared_rng
        self._rolls = False
        self._meeting, self._sharded = meeting_layers(model), sharded
        self._coordinator: Coordinator | None = None
        self.several = self._checked = False
        self._signature: Any = None
        self._scripts: dict[Any, Scripts] = {}
        self._form, self._counts = Form(), False
        self._most: dict[bool, int] = {}
        self._dense: dict[Any, tuple[int, ...] | None] = {}

    def together(self, run: Callable[[], T]) -> T:
        """Run a step on all ranks, if there are several; each learns of a failure.

        Raises:
            RankError: this process was started as one of several, and they do not know each other;
                or one was lost in an earlier step.
        """
        coordinator = None
        if several(self._handle, launched=not self._checked):
            called = self._sharded is not None
            facts = int(self._shared_rng)
            coordinator = Coordinator(group_of(self._handle), facts=facts, called=called)
        self._coordinator, self.several = coordinator, coordinator is not None
        self._checked = coordinator is None  # what a process was launched as does not change
        self._rolls = self._shared_rng
        try:
            with plain(self._meeting):
                if self._sharded is not None:
                    run = partial(self._with_full_model, self._sharded, run)
                return run() if coordinator is None else guarded(coordinator, run)
        finally:
            self._coordinator, self.several = None, False

    def foreseeing(self, run: Callable[[], T]) -> T:
        """Run a forecast; only a sharded model requires the call on all ranks."""
        with plain(self._meeting):
            if self._sharded is None:
                return run()
            group = group_of(self._handle) if several(self._handle) else None
            return self._sharded.around(run, group)

    def _with_full_model(self, sharded: Sharded, run: Callable[[], T]) -> T:
        if self._coordinator is None:
            return sharded.around(run, None)
        return sharded.around(run, self._coordinator.group, partial(coordinated, self._coordinator))

    def learn(self, retry: Retry) -> None:
        """Forget the recorded collectives of a step that is run again: it may have others."""
        self._scripts.pop(self._signature, None)
        if "dense" in retry.learned:
            self._dense[self._signature] = retry.learned["dense"]

    def most(self, *, trains: bool) -> int:
        """Return the most samples that all ranks have had in a step; 0 where there is none yet."""
        return self._most.get(trains, 0)

    def join(
        self, here: Here, signature: Any, named: Named, scale: float = 1.0, hooks: int = 0
    ) -> LocalBatch:
        """Return the batch over all ranks; the RNG state may change.

        Args:
            here: the values of this rank.
            signature: of the batch; steps of one signature run the same collectives.
            named: the parameters, which all ranks must have alike.
            scale: factor of the gradients. Default 1.
            hooks: a number that the hooks of the parameters give. Default 0: there are none.
        """
        self._signature = signature, here.lanes, here.coupled
        if self._coordinator is not None and self._rolls:
            self._rolls = False
            with self._coordinator.shielded():
                same_rng(self._coordinator, devices_of(self._model))
        if self._coordinator is None:
            self.global_batch = LocalBatch(
                here.size, here.micro_batch, bool(here.lanes), bool(here.coupled)
            )
        else:
            alike = self._alike(self._coordinator.group, named, scale, hooks)
            scripts, dense = (
                self._scripts.get(self._signature),
                self._dense.get(self._signature, ()),
            )
            self.global_batch = Ranks(self._coordinator, here, alike, scripts, dense)
            most = self.most(trains=bool(here.trains))
            earlier = most if here.covers else 0  # no more than there are, where that did not fit
            self._most[bool(here.trains)] = max(earlier, self.global_batch.size)
        return self.global_batch

    def _alike(self, group: Group, named: Named, scale: float, hooks: int) -> Alike:
        order = group.orders.get(self, 0)
        self._counts = not order and not has_lazy(named)  # which get values in their first step
        values = 0 if order else values_of(named)
        return Alike(self._form.number(named), order, values, scale, self._adaptive, hooks)

    def end(self) -> Amended:
        """Wait until all ranks can commit the step, and record its collectives by signature.

        Returns:
            (parameter, sum) of gradients that differ from those of the step.
        """
        amended = self.global_batch.end()
        if isinstance(self.global_batch, Ranks) and self._coordinator is not None:
            self._scripts[self._signature] = script = self._scripts.get(self._signature, {})
            script |= self.global_batch.script
            self._dense[self._signature] = self.global_batch.dense
            if self._counts:
                self._coordinator.group.number(self)
        return amended if self._sharded is None else self._sharded.parts(amended)


def _is_all(handle: Any) -> bool:
    return dist.is_available() and dist.is_initialized() and handle is dist.group.WORLD


def several(handle: Any = None, *, launched: bool = True) -> bool:
    """Say whether a batch is shared by several processes.

    Args:
        handle: their process group. Default None: that of all.
        launched: ask the environment whether this process was started as one of several.

    Raises:
        RankError: it should be, and no process group is there.
    """
    if dist.is_available() and dist.is_initialized():
        return bool(dist.get_world_size(handle) > 1)
    world = os.environ.get("WORLD_SIZE", "1") if launched else "1"
    if world != "1" and dist.is_available() and dist.is_torchelastic_launched():
        raise RankError(
            f"the {world} processes that were started together must have a process group, and "
            'there is none: call torch.distributed.init_process_group("gloo"), or "nccl" on CUDA, '
            "before the first step"
        )
    return False
