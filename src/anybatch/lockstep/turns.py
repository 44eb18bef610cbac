"""RNG state of every lane: its draws do not depend on the lanes that run in between.

A checkpointed part of a model saves the state of the generator and restores it when it recomputes.
If it has to wait in the middle of that, the others must not find its state, nor move it. So torch's
generators are swapped with the token, and so is state that forward stores on the model. The first
lane continues from the state at the beginning of the step, the others from seeds drawn from it,
without moving it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from anybatch.core import accelerators
from anybatch.core.accelerator import States
from anybatch.core.rng import RNGState
from anybatch.execution.gradients import Gradients
from anybatch.lockstep.slots import LaneSlots
from anybatch.memory.pager import Pager


class LaneTurns:
    """Switch of torch's generators between lanes, at which the pager frees memory.

    Args:
        lanes: how many.
        slots: attributes and containers that each lane has of its own.
        gradients: those of a lane are added up whenever the token is passed, because the next one's
            must not be added to them in half precision; None (default) where there are none.
        pager: of their tensors; None (default) offloads none.
        everything: Python's and numpy's generators change hands too. Default False.
    """

    def __init__(
        self,
        lanes: int,
        slots: Iterable[Any] = (),
        gradients: Gradients | None = None,
        pager: Pager | None = None,
        *,
        everything: bool = False,
    ) -> None:
        self._pager, self._gradients = pager, gradients
        self._slots = LaneSlots(slots, lanes)
        self._start = torch.get_rng_state()
        self._states = accelerators.random_states()
        if self._states:  # the thread that begins has one, and autograd's
            accelerators.clear_workspaces()
        source = torch.Generator("cpu")
        source.set_state(self._start)
        self._seeds = torch.randint(2**62, (lanes,), generator=source, device="cpu").tolist()
        self._rng_states: dict[int, RNGState] | None = {} if everything else None
        self._stored: list[tuple[Tensor, States] | None] = [None] * lanes

    def begin(self, lane: int) -> None:
        """Make the lane's state the present one."""
        if self._pager is not None:
            self._pager.begin(lane)
        self._slots.begin(lane)
        stored = self._stored[lane]
        if stored is not None:
            self._put_back(*stored)
        elif lane == 0:
            self._put_back(self._start, self._states)
        else:
            torch.default_generator.manual_seed(self._seeds[lane])
            if self._states:
                accelerators.seed(self._seeds[lane])
        if self._rng_states and lane in self._rng_states:
            self._rng_states[lane].put_back()

    def around(self, lane: int) -> None:
        """Continue a lane: its RNG state is in place."""
        if self._pager is not None:
            self._pager.around(lane)

    def pass_token(self, lane: int, coming: list[int]) -> None:
        """Store the lane's state, and offload tensors beyond the budget."""
        if self._gradients is not None:
            self._gradients.collect()
        if self._pager is not None:
            self._pager.end(lane, coming)
        if self._states:
            accelerators.clear_workspaces()
        self._slots.store(lane)
        states = accelerators.random_states() if self._states else ()
        self._stored[lane] = torch.get_rng_state(), states
        if self._rng_states is not None:
            self._rng_states[lane] = RNGState.now()

    def finish(self) -> None:
        """Restore the RNG state of the first lane, and the attributes of the last one."""
        self._slots.finish()
        stored = self._stored[0]
        if stored is not None:
            self._put_back(*stored)
        if self._rng_states:
            self._rng_states[0].put_back()

    def put_back(self) -> None:
        """Restore the attributes from before a step that failed."""
        self._slots.put_back()

    def _put_back(self, cpu: Tensor, states: States) -> None:
        torch.set_rng_state(cpu)
        accelerators.put_random_states(states)
