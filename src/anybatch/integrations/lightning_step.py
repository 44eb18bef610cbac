"""Wrapper of a `training_step` for the engine, and torchmetrics inside it.

    TracedModel ── StepModule ── LightningModule.training_step(rows, batch_idx)
                   │ what it logs is recorded, by name, once for each micro-batch
                   └ {"loss": ..., "logged": {...}, "rows": n, "extra": {...}}

A micro-batch may be run more than once: without data, for a forecast, or again. So nothing of it is
logged where it runs. Only values passed to an observer count, and these are combined when the step
is over: a mean over samples, or by ``reduce_fx``. Source: Lightning 2.6, ``LightningModule.log``
and ``_AutomaticOptimization``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from numbers import Number
from threading import local
from types import FunctionType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torchmetrics import Metric

from anybatch.core import pytree
from anybatch.core.accelerator import wide
from anybatch.core.barrier import looks_here
from anybatch.core.modules import DispatchMode
from anybatch.core.reached import names_of
from anybatch.errors import LossError
from anybatch.loss.model_trace import rows_of
from anybatch.loss.traced_model import TracedModel, TracedOutputs
from anybatch.memory.fakes import is_fake

Step = Callable[..., Any]
REDUCED: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda values, _: values.sum(),
    "max": lambda values, _: values.max(),
    "min": lambda values, _: values.min(),
    torch.sum: lambda values, _: values.sum(),
    torch.max: lambda values, _: values.max(),
    torch.min: lambda values, _: values.min(),
}
"""Reductions of the values of micro-batches, by ``reduce_fx``; else the mean over samples."""


class SkippedError(LossError):
    """Raised where ``training_step`` returned None, which skips a batch."""


class Untouched(DispatchMode):
    """Dispatch mode in which nothing may be computed."""

    def __torch_dispatch__(self, *_arguments: Any, **_named: Any) -> Any:
        """Refuse a kernel."""
        raise SkippedError("something is computed")


def skips(step: Callable[..., Any], *arguments: Any) -> bool:
    """Say whether ``training_step`` skips a batch, and does so before it computes anything.

    None for some rows does not decide for the batch: they may be too few, or one of them not
    finite. And a forward before it would have moved buffers and RNG states. Neither is possible if
    no kernel runs: then this call is equal to Lightning's own.
    """
    try:
        with Untouched():
            return step(*arguments) is None
    except SkippedError:
        return False


@lru_cache(maxsize=100)
def reads_epoch(cls: type) -> bool:
    """Say whether a method of a user's class names the number of the epoch."""
    own = [base for base in cls.__mro__ if not base.__module__.startswith(("lightning.", "torch."))]
    methods = [one for base in own for one in vars(base).values() if isinstance(one, FunctionType)]
    return any("current_epoch" in names_of(one.__code__) for one in methods)


class Log:
    """Recorder in place of ``LightningModule.log`` during micro-batches; a lane is a thread.

    Attributes:
        options: logged name -> its other arguments.
        metrics: of every name whose value was a metric, that metric.
    """

    def __init__(self) -> None:
        self.options: dict[str, dict[str, Any]] = {}
        self.metrics: dict[str, Metric] = {}
        self._lane = local()

    def __deepcopy__(self, memo: dict[int, Any]) -> Log:
        return self

    def __reduce__(self) -> tuple[type[Log], tuple[()]]:
        return Log, ()

    def begin(self) -> None:
        """Begin a micro-batch of this lane."""
        self._lane.values = {}
        self._lane.calls = {}

    def end(self, loss: Tensor, extra: Mapping[str, Any]) -> None:
        """End the micro-batch, with the values that its step returned."""
        self._lane.extra = dict(extra)
        self._lane.is_loss = [n for n, value in self._lane.values.items() if _same(value, loss)]

    def call(self, path: str, way: str, arguments: Any) -> None:
        """Record the arguments of a metric's call."""
        self._lane.calls[f"{len(self._lane.calls)} {way} {path}"] = arguments

    def collected(self) -> dict[str, Any]:
        """Return the micro-batch's logged and returned values, and its metric calls."""
        lane = self._lane
        found = {"logged": lane.values, "is loss": lane.is_loss}
        return found | {"extra": lane.extra, "calls": lane.calls}

    def __call__(self, name: str, value: Any, *places: Any, **options: Any) -> None:
        """Take a value aside; the arguments are those of ``LightningModule.log``."""
        self.options[name] = dict(zip(PLACES, places, strict=False)) | options
        if isinstance(value, Metric):
            self.metrics[name] = value
            return
        if not isinstance(value, Tensor | Number):
            raise ValueError(
                "a value that is logged must be a number, a tensor of one or a metric, and "
                f"self.log({name!r}, ...) got {type(value).__name__}: log its parts by their "
                "names, with self.log_dict for instance, or leave it out"
            )
        value = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
        if value.numel() != 1:
            raise ValueError(
                f"a value that is logged must be a single number, and self.log({name!r}, ...) got "
                f"a tensor of shape {tuple(value.shape)}: log its mean, for instance"
            )
        self._lane.values[name] = value.squeeze()


PLACES = (
    "prog_bar logger on_step on_epoch reduce_fx enable_graph sync_dist sync_dist_group "
    "add_dataloader_idx batch_size metric_attribute rank_zero_only"
).split()
"""Parameters of ``log`` after the value, in order."""


class Present:
    """Inputs of a step other than its rows; its copy in a dry run shares them.

    Attributes:
        trainer: the Trainer.
        rest: arguments of ``training_step`` after the batch.
        log: receives the logged values.
    """

    def __init__(self, trainer: Any, log: Log) -> None:
        self.trainer, self.log = trainer, log
        self.rest: tuple[Any, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Present:
        return self


class StepModule(nn.Module):
    """Wrapper of a LightningModule, with one of its steps as forward.

    Args:
        module: the user's.
        step: ``step(module, rows, *rest)`` -> loss, or a mapping with "loss".
        present: its other parameters than the rows.
    """

    def __init__(self, module: LightningModule, step: Step, present: Present) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self.epoch = 0  # a step may compute by the number of the epoch, which is the Trainer's
        self._step, self._present = step, present

    def forward(self, rows: Any) -> dict[str, Tensor]:
        """Return the loss of some rows of the batch, by its name."""
        if self.module._trainer is None:  # a copy
            self.module.trainer = self._present.trainer
        self._present.log.begin()
        found = self._step(self.module, rows, *self._present.rest)
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if found is None:
            raise SkippedError(
                "training_step must skip a batch before it reads rows, by batch_idx for instance, "
                "and it returned None for some rows of one: return a loss of zero (loss * 0), or "
                "leave such a batch out of the loader"
            )
        if not isinstance(loss, Tensor):
            raise LossError(
                "training_step must return its loss, or a dict with 'loss', for all of its rows, "
                f"and it returned {type(found).__name__}: return a loss of zero (loss * 0) where a "
                "batch should be skipped"
            )
        extra = {k: v for k, v in found.items() if k != "loss"} if found is not loss else {}
        self._present.log.end(loss, extra)
        return {"loss": loss}


class TracedStep(TracedModel):
    """Wrapper that traces a loss and shows an observer the logged and returned values."""

    def __init__(self, rows: StepModule, log: Log) -> None:
        super().__init__(rows)
        self._log = log

    def forward(self, *args: Any, **kwargs: Any) -> TracedOutputs:
        """Run the step, and trace its loss."""
        traced = super().forward(*args, **kwargs)
        rows = torch.full((), rows_of((args, kwargs)), device=traced["loss"].device)
        traced.update(pytree.map_tensors(Tensor.detach, self._log.collected()), rows=rows)
        return traced


class StepObserver:
    """The observer of a step."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._logged: list[dict[str, Tensor]] = []
        self._extra: list[dict[str, Any]] = []
        self._is_loss: set[str] = set()
        self._calls: list[dict[str, Any]] = []

    def __call__(self, outputs: Any, targets: Any) -> None:
        """Take in a micro-batch."""
        del targets
        self._rows.append(outputs["rows"])
        self._logged.append(pytree.map_tensors(torch.clone, outputs["logged"]))
        self._extra.append(outputs["extra"])
        self._is_loss.update(outputs["is loss"])
        self._calls.append(outputs["calls"])

    def logged(self, loss: Tensor, log: Log) -> dict[str, Any]:
        """Return every logged name with its value for the full batch."""
        found: dict[str, Any] = {}
        for name in dict.fromkeys(name for one in self._logged for name in one):
            if name in self._is_loss:
                found[name] = loss
                continue
            there = [
                (one[name], n)
                for one, n in zip(self._logged, self._rows, strict=True)
                if name in one
            ]
            values = torch.stack([value for value, _ in there])
            weights = torch.stack([n for _, n in there])
            reduced = REDUCED.get(log.options[name].get("reduce_fx", "mean"), mean)
            found[name] = reduced(values, weights)
        return found

    def update(self, module: nn.Module) -> None:
        """Call the metrics of a module as they were called, once, with all rows."""
        rows = torch.stack(self._rows)
        for name in self._calls[0]:
            _, way, path = name.split(" ", 2)
            arguments, named = [
                {key: _together([one[name][i][key] for one in self._calls], rows) for key in keys}
                for i, keys in enumerate(self._calls[0][name])
            ]
            with torch.no_grad():
                getattr(module.get_submodule(path), way)(*arguments.values(), **named)

    def extra(self) -> dict[str, Any]:
        """Return the full batch's values that ``training_step`` returned next to the loss.

        Tensors with rows are put one after another; of single numbers it is the mean over samples;
        of all else that of the last micro-batch.
        """
        rows = torch.stack(self._rows)
        return {key: _together([one[key] for one in self._extra], rows) for key in self._extra[-1]}


def mean(values: Tensor, rows: Tensor) -> Tensor:
    """Return the mean over samples of values that are means over `rows` samples each."""
    weights = rows.to(values.dtype if values.is_floating_point() else torch.float32)
    total: Tensor = (values * weights).sum() / weights.sum()
    return total


def _together(values: list[Any], rows: Tensor) -> Any:
    if not all(isinstance(value, Tensor) for value in values):
        return values[-1]
    if all(value.dim() == 0 for value in values):
        return mean(torch.stack(values), rows)
    fits = all(len(value) == n for value, n in zip(values, rows.tolist(), strict=True))
    return torch.cat(values) if fits else values[-1]


def _same(value: Tensor, loss: Tensor) -> bool:
    """Say whether a value that was logged is the loss itself, detached or not."""
    if is_fake(value) or is_fake(loss):
        return False
    return value.dtype == loss.dtype and value.data_ptr() == loss.data_ptr()


# torchmetrics inside a `training_step` that is called with parts of a batch.
#
# A metric has state between calls, and rows may be run more than once: in an inspection, on a copy
# without data, or again after memory ran out. So while micro-batches run, the arguments of a metric
# of the module are stored, and it is called once, with all rows, when the step is over. Inside the
# step its call returns the value of its own rows. Source: torchmetrics 1.9, ``Metric.forward``.

WAYS = ("forward", "update")


class MetricCall:
    """Recorder in place of a metric's ``forward`` or ``update``; copies of the module share it."""

    def __init__(self, path: str, way: str, metric: Metric, log: Log) -> None:
        self._path, self._way, self._log = path, way, log
        fresh = metric.clone()
        fresh.reset()
        self._fresh = fresh

    def __deepcopy__(self, memo: dict[int, Any]) -> MetricCall:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Take the arguments aside."""
        places = {str(i): value for i, value in enumerate(arguments)}
        self._log.call(self._path, self._way, [places, named])
        if self._way == "update":
            return None
        tensors = [t for _, t in pytree.tensors((arguments, named))]
        if any(is_fake(t) for t in tensors):
            return torch.zeros((), device=tensors[0].device)
        with torch.no_grad():
            self._fresh.reset()
            value = self._fresh(*pytree.map_tensors(Tensor.detach, arguments), **named)
            self._fresh.reset()
            return _of_samples(value, tensors) if looks_here() else value


def _of_samples(value: Any, arguments: list[Tensor]) -> Any:
    """Return the value, made to depend on all samples of the arguments.

    A metric may read numbers, and make a tensor of them: samples cannot be traced through that.
    """
    if not arguments:
        return value
    every = torch.stack([wide(one.detach().sum().real).cpu() for one in arguments]).sum()

    def marked(one: Tensor) -> Tensor:
        always = torch.ones((), dtype=torch.bool, device=one.device)
        return torch.where(always, one, every.to(one))

    return pytree.map_tensors(marked, value)


@contextmanager
def recorded_metrics(module: nn.Module, log: Log) -> Iterator[None]:
    """Record arguments of the module's metrics in the body, without a change of their state."""
    metrics = [(path, one) for path, one in module.named_modules() if isinstance(one, Metric)]
    before = [(one, way, vars(one).get(way)) for _, one in metrics for way in WAYS]
    calls = [(one, way, MetricCall(path, way, one, log)) for path, one in metrics for way in WAYS]
    for one, way, call in calls:
        vars(one)[way] = call
    try:
        yield
    finally:
        for one, way, own in before:
            del vars(one)[way]
            if own is not None:
                vars(one)[way] = own


def drops_gradients(trainer: Any, module: LightningModule) -> bool:
    """Return whether Lightning empties the gradients before any hook reads them."""
    looks = any(
        is_overridden(name, module, parent=LightningModule)
        for name in ("on_before_zero_grad", "optimizer_zero_grad")
    ) or any(is_overridden("on_before_zero_grad", c, parent=Callback) for c in trainer.callbacks)
    return bool(module.automatic_optimization) and not looks
