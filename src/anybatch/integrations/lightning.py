"""Lightning callback that runs `training_step` on any mini-batch, within a budget.

With it ``Trainer(callbacks=[FullBatch(memory="6GiB")])`` runs every batch of the loader as one
step, of any size. In automatic optimisation Lightning calls for a loss, clears the gradients, and
calls backward on the loss, in that order; so the full batch runs in the call for the loss, its
gradients are stored aside, and the backward of the returned loss delivers them:

    training_step(batch)       ->  engine: training_step(rows), training_step(rows), ...
    optimizer.zero_grad()          gradients wait beside ``.grad``
    backward(loss)             ->  ``.grad`` += gradient of the full batch, times what came in
    clip, step, log, schedule      Lightning's own

In manual optimisation a step is the user's code, and `full_batch_loss` returns such a loss. Source:
Lightning 2.6, ``Closure`` and ``Strategy.training_step``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from anybatch.core.plan import Plan
from anybatch.engine.engine import BatchNormMode, Engine, RngMode
from anybatch.errors import NotExactError, NotYetError
from anybatch.integrations.handed import Handed
from anybatch.integrations.install import require
from anybatch.lockstep.sync_batchnorm import Adaptive
from anybatch.loss.traced_model import OfModel
from anybatch.planner.planner import RUNGS

require("lightning", "lightning")

from lightning.pytorch import Callback, LightningModule  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    BatchSizeFinder,
    GradientAccumulationScheduler,
)
from lightning.pytorch.plugins.precision import (  # noqa: E402
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy  # noqa: E402
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature  # noqa: E402

from anybatch.integrations.lightning_step import (  # noqa: E402
    Log,
    Present,
    SkippedError,
    Step,
    StepModule,
    StepObserver,
    TracedStep,
    drops_gradients,
    reads_epoch,
    recorded_metrics,
    skips,
)

WAY_OUT = (
    "make it such a sum, and mark the part of it in which samples meet, "
    "anybatch.coupled(fn)(outputs, targets), and a part that belongs to no sample, such as the "
    "square of a weight, anybatch.coupled(lambda value: 0.1 * value)(weight.square().sum())"
)


class StepEngine:
    """A step of a module, with the engine that runs it."""

    def __init__(self, module: Any, step: Step, present: Present, options: dict[str, Any]) -> None:
        self.subject = TracedStep(StepModule(module, step, present), present.log)
        self.engine = Engine(self.subject, OfModel(self.subject, WAY_OUT), **options)

    def as_now(self, module: Any) -> None:
        """Let the engine see in which mode the module is, and in which epoch if it asks for it."""
        self.subject.training = self.subject.model.training = module.training
        if reads_epoch(type(module)):  # type: ignore[arg-type]  # another number is looked at
            vars(self.subject.model)["epoch"] = int(module.current_epoch)


class FullBatch(Callback):  # type: ignore[misc]
    """Callback that makes each batch of the loader one exact step, within `memory`.

    ``training_step`` is called with rows of the batch, and yields the full batch: the loss that
    Lightning shows, and each ``.grad``, are those of one call with all rows, over all ranks with
    ``strategy="ddp"``. Its loss is a weighted sum of torch's own losses, as
    `anybatch.loss.traced_model` finds it, and of values marked with `anybatch.coupled`, such as
    Dice or InfoNCE. Its logs are logged once for a step: the loss exactly, any other value as the
    mean over samples of the values of micro-batches (or with ``reduce_fx`` "sum", "min", "max" by
    that). Its other returned values reach ``on_train_batch_end`` combined in the same way, and
    tensors with rows one after another. A torchmetrics metric of the module is updated once, with
    all rows; its call inside ``training_step`` returns the value of some rows. If ``training_step``
    returns None for a batch, with any rows, Lightning skips the batch. Validation is Lightning's
    own.

    If nothing reads gradients between two steps, those of the last one are dropped before the next,
    not in its middle; they are not restored after a step that failed.

    Args:
        memory: budget of a step on the device, as for `Engine`.
        micro_batch: samples in a micro-batch; None (default) chooses.
        batchnorm: as for `Engine`.
        rng: as for `Engine`; "batch" draws dropout as the undivided batch would.
        plan: obey it; a checkpoint brings its own.
        rungs: as for `Engine`.

    Attributes:
        engine: the `Engine` of the last step, with ``engine.plan`` and ``engine.last``; None
            before.

    Raises:
        ImportError: lightning is not installed.
        ValueError: when training begins, ``accumulate_grad_batches``, or a BatchSizeFinder; at the
            step, where the first was set later.
        NotYetError: when training begins, a strategy or a precision that has not been tried.
        LossError: at the first step, if the loss is not recognised.

    Example:
        >>> trainer = Trainer(max_epochs=3, callbacks=[FullBatch(memory="6GiB")])
        >>> trainer.fit(module, loader)
    """

    def __init__(
        self,
        memory: float | str | None = None,
        micro_batch: int | None = None,
        batchnorm: BatchNormMode | Adaptive = "exact",
        rng: RngMode = "micro_batch",
        plan: Plan | None = None,
        rungs: Collection[str] = RUNGS,
    ) -> None:
        self.engine: Engine | None = None
        self._requested: dict[str, Any] = {
            "memory": memory,
            "micro_batch": micro_batch,
            "plan": plan,
        }
        self._how: dict[str, Any] = {"batchnorm": batchnorm, "rng": rng, "rungs": rungs}
        self._plans: dict[str, Plan] = {}
        self._parts: dict[str, StepEngine] = {}
        self._present = Present(None, Log())
        self._undo: list[Callable[[], None]] = []
        self._handed: list[Handed] = []

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Refuse unsupported settings of a Trainer, before anything is moved."""
        if stage == "fit":
            refuse_trainer(trainer, pl_module)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Take the place of ``training_step``, where optimisation is automatic."""
        self._parts.clear()
        self._present.trainer = trainer
        wrapped = trainer.strategy.model
        if isinstance(wrapped, DistributedDataParallel):  # else it would wait for its own hooks
            wrapped.require_backward_grad_sync = False
            self._undo.append(lambda: setattr(wrapped, "require_backward_grad_sync", True))
        if pl_module.automatic_optimization:
            self._replace(pl_module)

    def _replace(self, module: LightningModule) -> None:
        own = module.training_step
        before = vars(module).get("training_step")

        @functools.wraps(own)
        def full_step(batch: Any, *rest: Any) -> Any:
            self._present.rest = rest
            observer = StepObserver()
            try:
                loss = self._run(module, "training_step", function_of(own), batch, observer)
            except SkippedError:
                logged: list[Any] = []
                with logging_to(
                    module, lambda *arguments, **named: logged.append((arguments, named))
                ):
                    if not skips(own, batch, *rest):
                        raise
                for arguments, named in logged:
                    module.log(*arguments, **named)
                return None
            extra = observer.extra()
            return {"loss": loss, **extra} if extra else loss

        def back() -> None:
            vars(module).pop("training_step", None)
            if before is not None:
                vars(module)["training_step"] = before

        vars(module)["training_step"] = full_step
        self._undo.append(back)

    def _run(
        self, module: Any, name: str, step: Step, batch: Any, observer: StepObserver
    ) -> Tensor:
        """Return the loss of the full batch; its backward hands over the gradients."""
        trainer, log = self._present.trainer, self._present.log
        refuse_accumulation(trainer)
        part = self._part(module, name, step)
        part.as_now(module)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        handed = Handed(module, trainer.optimizers, scaler)
        log.options.clear()
        log.metrics.clear()
        drop = drops_gradients(trainer, module)
        with (
            handed.aside(drop=drop),
            logging_to(module, log),
            recorded_metrics(module, log),
            refusing_zero_grad(module, trainer),
        ):
            loss = part.engine.backward((batch,), scaler=scaler, observe=observer)
        self.engine = part.engine
        steady = part.engine._steady  # that of the fastest size so far
        if steady is not None:
            self._plans[name] = steady
        observer.update(module)
        for key, value in (observer.logged(loss, log) | log.metrics).items():
            module.log(key, value, **log.options[key])
        self._handed.append(handed)
        return handed.loss(loss)

    def _part(self, module: Any, name: str, step: Step) -> StepEngine:
        if name not in self._parts:
            plan = self._requested["plan"] or self._plans.get(name)
            options = self._requested if plan is None else {"plan": plan}
            optimizers = self._present.trainer.optimizers
            optimizer = optimizers[0] if len(optimizers) == 1 else None
            options = {**options, **self._how, "optimizer": optimizer}
            self._parts[name] = StepEngine(module, step, self._present, options)
        return self._parts[name]

    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: Tensor) -> None:
        """Refuse the backward of a loss that was computed in one piece."""
        del trainer, pl_module, loss
        refuse_backward(handed=any(one.waits for one in self._handed))

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        """Refuse an update without the gradients of the batch."""
        del trainer
        waits = bool(self._handed) and self._handed[-1].waits
        refuse_unreached(waits=waits and pl_module.automatic_optimization)

    def on_train_batch_end(self, *_arguments: Any) -> None:
        """Drop gradients that were not handed over."""
        self._handed.clear()

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Give ``training_step`` its place again."""
        del trainer, pl_module
        self._restore()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give ``training_step`` its place again."""
        del trainer, pl_module, exception
        self._restore()

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._present.trainer = None
        self._handed.clear()
        self._parts.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or another process: requested settings, and plans."""
        fresh = FullBatch()
        lasting = ("_requested", "_how", "_plans")
        return vars(fresh) | {name: vars(self)[name] for name in lasting}

    def state_dict(self) -> dict[str, Any]:
        """Return the plans, so that a run goes on in the same parts."""
        return {name: json.loads(plan.to_json()) for name, plan in self._plans.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the plans of a checkpoint."""
        self._plans = {n: Plan.from_json(json.dumps(plan)) for n, plan in state_dict.items()}


def full_batch_loss(module: LightningModule, fn: Callable[[Any], Any], batch: Any) -> Tensor:
    """Return the loss of the full batch in manual optimisation, for ``self.manual_backward``.

    Args:
        module: the LightningModule, in its ``training_step``.
        fn: a method of it, ``fn(rows)`` -> loss. It is called for every micro-batch, also on a copy
            of the module, so it must reach all it needs through ``self`` and `rows`.
        batch: any tree of tensors of shape [N_B, ...]; noise to draw from belongs into it.

    Returns:
        A 0-dim tensor. Its backward adds to ``.grad`` of every parameter that requires it now.

    Raises:
        ValueError: the Trainer has no `FullBatch`, or `fn` is not a method of `module`.

    Example:
        >>> loss = full_batch_loss(self, self.loss_of_critic, (images, noise))
        >>> critic_optimizer.zero_grad()
        >>> self.manual_backward(loss)
        >>> critic_optimizer.step()
    """
    every = [] if module._trainer is None else module.trainer.callbacks
    callback = next((one for one in every if isinstance(one, FullBatch)), None)
    if callback is None or callback._present.trainer is None:
        raise ValueError(
            "full_batch_loss must be called while a Trainer with FullBatch trains, and there is "
            "none: Trainer(callbacks=[FullBatch()])"
        )
    if getattr(fn, "__self__", None) is not module:
        raise ValueError(
            "the loss must be a method of the module, so that its memory can be forecast on a "
            f"copy of it, and fn is {fn!r}: write def my_loss(self, rows), and pass self.my_loss"
        )
    callback._present.rest = ()
    return callback._run(module, fn.__name__, function_of(fn), batch, StepObserver())


def function_of(method: Any) -> Step:
    """Return the function of a bound method, to be called with another module."""
    own = getattr(method, "__func__", None)
    return own if own is not None else lambda _module, *arguments: method(*arguments)


@contextmanager
def logging_to(module: Any, log: Callable[..., None]) -> Iterator[None]:
    """Let ``module.log`` take values aside in the body."""
    before = vars(module).get("log")
    vars(module)["log"] = log
    try:
        yield
    finally:
        del vars(module)["log"]
        if before is not None:
            vars(module)["log"] = before


# Refusals of Lightning `Trainer` features that the callback does not support, before training.

PRECISIONS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
LINE = "self.manual_backward(full_batch_loss(self, self.my_loss, batch))"
"""Lines to paste in a training_step with manual optimisation."""


def refuse_trainer(trainer: Any, module: Any) -> None:
    """Refuse settings that conflict with the engine's decisions, or are untested.

    Raises:
        ValueError: a step would not be one batch, or the batch be changed.
        NotYetError: not possible today.
    """
    refuse_accumulation(trainer)
    _refuse_places(trainer, module)
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise NotYetError(
            "a batch must be loaded before it is split, and training_step has dataloader_iter: "
            "let it have (batch, batch_idx)"
        )


def refuse_accumulation(trainer: Any) -> None:
    """Refuse a step that is not one batch, whenever that was set.

    Raises:
        ValueError: it is several, or a part of one.
    """
    of_finder = [c for c in trainer.callbacks if isinstance(c, BatchSizeFinder)]
    if of_finder:
        raise ValueError(
            "the batch size must not change, and a BatchSizeFinder reduces it until it fits: "
            'leave it out, and give FullBatch(memory="6GiB") or nothing; its plan finds the '
            "micro-batch"
        )
    scheduled = any(
        isinstance(c, GradientAccumulationScheduler) and set(c.scheduling.values()) != {1}
        for c in trainer.callbacks
    )
    if trainer.accumulate_grad_batches != 1 or scheduled:
        raise ValueError(
            "with FullBatch a step is one batch already, and accumulate_grad_batches is "
            f"{'scheduled' if scheduled else trainer.accumulate_grad_batches}: leave it out, and "
            "make the loader's batch_size as large as the optimisation wants"
        )


def _refuse_places(trainer: Any, module: Any) -> None:
    if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise NotYetError(
            "FullBatch trains on one device, or on several with DDPStrategy, and the strategy is "
            f"{type(trainer.strategy).__name__}: give strategy='auto' or 'ddp'"
        )
    if type(trainer.precision_plugin) not in PRECISIONS:
        raise NotYetError(
            "FullBatch has been tested with 32-true, 64-true, 16-true, bf16-true, 16-mixed and "
            f"bf16-mixed, and the precision is that of {type(trainer.precision_plugin).__name__}: "
            "use one of these"
        )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise NotYetError(
            "a compiled model that computes its own loss is not supported by the engine today: "
            "give the Trainer the module without torch.compile"
        )


@contextmanager
def refusing_zero_grad(module: Any, trainer: Any) -> Iterator[None]:
    """Refuse ``zero_grad`` of a module, its parts or its optimizers in the body: a step runs.

    Raises:
        NotExactError: from ``training_step``, which calls it.
    """
    wrapped = getattr(trainer.strategy, "_lightning_optimizers", ())  # what self.optimizers() gives
    owners = [module, *module.children(), *trainer.optimizers, *wrapped]
    before = [vars(owner).get("zero_grad") for owner in owners]
    for owner in owners:
        vars(owner)["zero_grad"] = _no_zero_grad
    try:
        yield
    finally:
        for owner, own in zip(owners, before, strict=True):
            vars(owner).pop("zero_grad", None)
            if own is not None:
                vars(owner)["zero_grad"] = own


def _no_zero_grad(*_arguments: Any, **_named: Any) -> None:
    raise NotExactError(
        "gradients must not change while micro-batches run, and training_step calls zero_grad, "
        "which clears those of earlier micro-batches: leave it out, because Lightning clears them "
        "before each backward; in manual optimisation, call it outside of the function of "
        "full_batch_loss"
    )


def refuse_backward(*, handed: bool) -> None:
    """Refuse ``manual_backward`` of a loss that the engine did not compute.

    Raises:
        ValueError: none was requested since the last one.
    """
    if not handed:
        raise ValueError(
            "with FullBatch manual_backward needs the loss of the full batch, and this one was "
            "computed in one piece, which cannot be split afterwards: write its lines as a "
            f"method, def my_loss(self, rows), and {LINE}"
        )


def refuse_unreached(*, waits: bool) -> None:
    """Refuse an update if the module's own ``backward`` omits the gradients of the batch.

    Raises:
        NotExactError: they still wait.
    """
    if waits:
        raise NotExactError(
            "backward must reach the loss of the full batch, which delivers its gradients, and "
            "after backward they are not delivered: call loss.backward() without inputs=, or "
            "return None from training_step to skip a batch"
        )
