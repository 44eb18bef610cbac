"""Contents of a checkpoint, from which a run continues bit for bit as if without interruption.

The usual model, optimizer and schedule are not enough: after a restart dropout draws from the
beginning again, an epoch starts over, its mean loss counts half of it. So a checkpoint also holds

    rng      the states of torch's, Python's and numpy's generators
    part     how far the present epoch is: mini-batches done, and the sums its figures are made of

The order of the images and the draws of each are a function of seed and epoch (`views`), so
mini-batches that are done are skipped without being read.

A checkpoint may be requested at any time, but is right only between two steps. With `AtomicStep`
any time is right: a step that does not end is undone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler

from anybatch.cli.faults import RunFolderError, unbroken
from anybatch.cli.metrics import Metric
from anybatch.devices import RNGState

FORMAT = 3  # raised when what a checkpoint holds changes its meaning

State = dict[str, Any]  # tensors, numbers, texts, and lists and dicts of them


@dataclass
class EpochProgress:
    """Progress of an epoch: its training half, as far as it is done.

    `batches` counts mini-batches of the loader; `loss` is the sum over `images`.
    """

    metric: Metric
    batches: int = 0
    images: int = 0
    loss: float = 0.0
    seconds: float = 0.0

    def figures(self) -> dict[str, Any]:
        """Return the figures of this half for the epoch's line in the log."""
        return {
            "metric": self.metric.name,
            "train_loss": self.loss / self.images,
            f"train_{self.metric.name}": self.metric.value(),
            "seconds": self.seconds,
            "images_per_second": self.images / max(self.seconds, 1e-9),
        }

    def state(self) -> State:
        """Return it as plain data."""
        numbers = {name: value for name, value in vars(self).items() if name != "metric"}
        return {**numbers, "counts": self.metric.counts()}

    def put_back(self, state: State) -> None:
        """Restore the values that `state` returned."""
        self.metric.go_on_from(tuple(state["counts"]))
        for name in ("batches", "images", "loss", "seconds"):
            setattr(self, name, state[name])


@dataclass
class RunCounters:
    """Progress of a run: complete epochs, steps, images, seconds; and number of resumptions.

    `seconds` are those of the parts before this one, `train_seconds` those of all complete epochs.
    """

    epoch: int = 0
    step: int = 0
    images: int = 0
    resumed: int = 0
    seconds: float = 0.0
    train_seconds: float = 0.0


@dataclass(frozen=True)
class Trained:
    """Model, optimizer and learning-rate schedule: the state that training changes."""

    model: nn.Module
    optimizer: optim.Optimizer
    schedule: LRScheduler

    def state(self, *, copies: bool) -> State:
        """Return the states of all three, under their names.

        With `copies` parameters are copied, one after another: if they are offloaded, writing one
        itself to a file would make it resident for good.
        """
        found = {name: part.state_dict() for name, part in vars(self).items()}
        if copies:
            model = found["model"]  # which also says the versions of its modules
            for name, value in model.items():
                model[name] = value.clone() if isinstance(value, Tensor) else value
        return found

    def put_back(self, state: State) -> None:
        """Put all three back.

        Raises:
            RunFolderError: when the states are those of another model or optimizer.
        """
        try:
            for name, part in vars(self).items():
                part.load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split()).rstrip(". ")
            raise RunFolderError(
                f"the checkpoint must be of the run's model and optimizer; {reason}. Give the "
                "model the code that it had, or start a new run."
            ) from error


def checked(state: State) -> State:
    """Return a checkpoint from which a run can continue; refuse one of another format.

    Raises:
        RunFolderError: when it was written by another version of the command.
    """
    if state.get("format") != FORMAT:
        raise RunFolderError(
            f"the checkpoint must be of format {FORMAT} to be resumed; it is of format "
            f"{state.get('format', 0)}, of another version of anybatch. Use that version, or start "
            "again with --overwrite."
        )
    return state


class AtomicStep:
    """A step that either is `done` or has not happened: a context manager.

    When the block ends in an error or an interrupt before `done` was called, the RNG state, the
    model's buffers and the counts of the metric are restored to its beginning. Parameters need no
    copy: the optimizer updates them at the end, where interrupts are deferred. Copies of buffers
    are on the host, not among the bytes of the device.
    """

    def __init__(self, model: nn.Module, metric: Metric | None = None) -> None:
        self.model, self.metric = model, metric
        self._done = False

    def __enter__(self) -> AtomicStep:
        self._rng = RNGState.now()
        self._buffers = {n: b.to("cpu", copy=True) for n, b in self.model.named_buffers()}
        self._counts = dict(vars(self.metric)) if self.metric is not None else {}
        return self

    def done(self) -> None:
        """From here on there is no way back."""
        self._done = True

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None or self._done:
            return
        with unbroken(), torch.no_grad():
            self._rng.put_back()
            if self.metric is not None:
                vars(self.metric).update(self._counts)
            for name, buffer in self.model.named_buffers():
                self._put_back(name, buffer)

    def _put_back(self, name: str, buffer: Tensor) -> None:
        before = self._buffers.get(name)
        if before is not None and before.shape == buffer.shape:
            buffer.copy_(before)
