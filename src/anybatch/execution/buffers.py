"""Buffers that forward moves, and their values after one forward of the full batch.

The undivided batch runs forward once; K micro-batches run it K times. A buffer whose new value does
not depend on the samples (the vectors of spectral_norm, a counter) is restored before each
micro-batch, so that every one of them starts and ends with the values of the single forward. If two
micro-batches end with different values, the buffer depends on their samples, and no order of
forwards gives the value of the full batch: that is refused.

    start -> mu_0 -> value;   start -> mu_1 -> value (the same, or refused);   ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from torch.nn.parameter import is_lazy

from anybatch.core.transaction import BufferState, same_values
from anybatch.errors import NotExactError

IN_BACKWARD = (
    "a buffer must not move in backward where a loss is computed on all outputs at once",
    "a checkpoint runs forward again). Take the modules that own them out of the checkpoint",
)
IN_LOSS = (
    "a buffer must not move in a loss that is computed on all outputs at once",
    "it calls a part of the model). Let forward call it and return its result, leave a module that "
    "only the loss calls out of the model",
)


class ForwardBuffers:
    """Keeps the buffers of a step as one forward would have them.

    Args:
        states: every buffer before the step.
        exempt: ``(id(module), name)`` of buffers that may run on (``batchnorm="local"``).
        recorded: paths of the buffers that forward moved in earlier steps; None compares the values
            of all of them, once; pass `moving` afterwards.

    Attributes:
        none: a forward has shown that there is nothing to do before the next one or after it.
        run_on: some buffers run on from micro-batch to micro-batch.
    """

    def __init__(
        self,
        states: list[BufferState],
        exempt: set[tuple[int, str]],
        recorded: frozenset[str] | None = None,
    ) -> None:
        self._states, self._exempt = list(states), list[BufferState]()
        if exempt:
            self._states = [s for s in states if (id(s.module), s.name) not in exempt]
            self._exempt = [s for s in states if (id(s.module), s.name) in exempt]
        self._recorded, self.none, self.run_on = recorded, False, bool(self._exempt)
        self._left: list[tuple[BufferState, Tensor | None]] | None = None

    @property
    def moving(self) -> frozenset[str]:
        """Paths of the buffers that forward moved in this step."""
        return frozenset(state.path for state, _ in self._left) if self._left else frozenset()

    @property
    def compared(self) -> bool:
        """Whether a forward of this step has shown which buffers it moves."""
        return self._left is not None

    @property
    def still(self) -> bool:
        """Whether the record shows that forward moves no buffer."""
        none = self._recorded == frozenset() if self._left is None else not self._left
        return none and not self._exempt

    def strays(self) -> list[str]:
        """Restore buffers that were written to though forward moves none; return their paths."""
        moved = [state for state in self._states if state.written()]
        for state in moved:
            state.put_back()
        return [state.path for state in moved]

    def refuse_strays(self) -> None:
        """Refuse those."""
        if strays := self.strays():
            raise _meets(strays)

    def before(self) -> None:
        """Set the buffers that forward moves back to where the step found them."""
        for state, _ in self._left or ():
            state.put_back()

    def write_final(self) -> None:
        """Set the buffers that forward moves to their values after one forward."""
        for state, values in self._left or ():
            if values is not None:
                _give(state, values)

    def on_host(self) -> dict[str, Tensor]:
        """Return the values of the buffers that forward moved, path -> tensor on the host."""
        left = self._left or ()
        return {state.path: values.cpu() for state, values in left if values is not None}

    def receive(self, buffers: Mapping[str, Tensor]) -> None:
        """Copy the buffer values of a forward on another rank; on this one it has not run."""
        for state in self._states:
            if state.path in buffers:
                _give(state, buffers[state.path])

    def after(self) -> None:
        """Check that forward moves the same buffers as before, to the same values."""
        if not self._states:
            self._left, self.none = [], True
            return
        if self._left is None:
            self._left = [(state, _copy(state)) for state in self._states if self._moves(state)]
            return
        first = {id(state) for state, _ in self._left}
        late = [s.path for s in self._states if id(s) not in first and self._moves(s)]
        other = [s.path for s, value in self._left if not same_values(s.now(), value)]
        if late or other:
            raise _meets(late + other)

    @contextmanager
    def unmoved(self, *, in_loss: bool = False) -> Iterator[None]:
        """Refuse buffers that backward or a loss inside moves: forward sets them again afterwards.

        Args:
            in_loss: the body is a loss. Default False: it is a backward.

        Raises:
            NotExactError: naming them.
        """
        before = [(state, _copy(state)) for state, _ in self._left or ()]
        written = {id(state) for state in self._states if state.written()}
        yield
        moved = [state.path for state, values in before if not same_values(state.now(), values)]
        moved += [
            s.path for s in self._states if id(s) not in written and s.written() and s.moved()
        ]
        if moved:
            begin, mend = IN_LOSS if in_loss else IN_BACKWARD
            raise NotExactError(
                f"{begin}, and these do: {', '.join(moved)} ({mend}, call eval() on the modules "
                "that own them, or give micro_batch >= the batch size"
            )

    def refuse_moved(self, tracked: Mapping[int, int | None]) -> None:
        """Refuse buffers that every lane moved again, where a single forward moves them once.

        Args:
            tracked: ids of buffers that were moved once for all lanes; for a counter, by how much.
        """
        moved = sorted(self.moving)
        for state in [*self._states, *self._exempt]:
            now = state.now()
            if not state.moved() or (now is not None and tracked.get(id(now), 0) is None):
                continue
            by = 0 if now is None else tracked.get(id(now), 0)
            if not by or state.values is None or now is None or int(now - state.values) != by:
                moved.append(state.path)
        if moved:
            raise NotExactError(
                "a buffer must not move while micro-batches wait for each other in BatchNorm, and "
                f"these do, in forward or in the loss: {', '.join(dict.fromkeys(moved))}. Call "
                'eval() on the modules that own them, use batchnorm="local", or give micro_batch '
                ">= the batch size"
            )

    def statistics(self) -> list[Tensor | None]:
        """Return the present values of the exempt buffers."""
        return [_copy(state) for state in self._exempt] if self._exempt else []

    def restart(self) -> None:
        """Restore all buffers that moved, running statistics included, for a second pass."""
        self._undo()
        for state in self._exempt:
            state.put_back()

    def go_back(self, statistics: list[Tensor | None]) -> None:
        """Undo a forward that may have ended halfway."""
        self._undo()
        self.settle(statistics)

    def _undo(self) -> None:
        if self._left is not None:
            self.before()
            return
        put_back_moved(self._states)

    def settle(self, statistics: list[Tensor | None]) -> None:
        """Give the exempt buffers the values that `statistics` returned."""
        for state, values in zip(self._exempt, statistics, strict=True):
            now = state.now()
            if now is not None and values is not None:
                now.copy_(values)

    def _moves(self, state: BufferState) -> bool:
        if self._recorded is None:
            return state.moved()
        return state.path in self._recorded or state.written()


def _meets(paths: list[str]) -> NotExactError:
    return NotExactError(
        "a buffer must not depend on the samples of a micro-batch, and these do: "
        f"{', '.join(paths)}. Update a queue or a moving average of samples after the step, from "
        "the outputs of forward (engine.backward's `observe` sees it): split forward in two. Or "
        "call eval() on the modules that own them, or give micro_batch >= the batch size"
    )


def put_back_moved(states: list[BufferState]) -> None:
    """Restore the buffers with other values; a write to others would count as a move."""
    for state in states:
        if state.moved():
            state.put_back()


def _give(state: BufferState, values: Tensor) -> None:
    now = state.now()
    if now is None or now.shape != values.shape:
        device = values.device if now is None else now.device
        state.module._buffers[state.name] = values.to(device, copy=True)
    else:
        now.copy_(values)


def _copy(state: BufferState) -> Tensor | None:
    now = state.now()
    return None if now is None or is_lazy(now) else now.detach().clone()
