"""A training run: its loop, and how it comes to an end that another process can go on from.

    for batch in epoch:
        optimizer.zero_grad()
        loss = engine.backward(batch)      all micro-batches, one after another
        optimizer.step()
        schedule.step()

A step is complete or has not happened; a checkpoint, whenever it is written, is of a complete
step. There is one before the first step, one after every epoch, one when the last is some minutes
old, and one when an interrupt or an error ends the run. Of several ranks all take the steps and
only the first writes; only that one has a clock and a folder, so the others follow it (`team`).

Source: MBS, Algorithm 1 and section 4.2.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from anybatch import Engine
from anybatch.cli import checkpoint
from anybatch.cli.build import (
    BatchNormPolicy,
    RunParts,
    circumstances,
    make_optimizer,
    make_schedule,
)
from anybatch.cli.checkpoint import AtomicStep, EpochProgress, RunCounters, State, Trained
from anybatch.cli.faults import Terminated, in_options, refuse_not_finite, unbroken
from anybatch.cli.metrics import make_metric
from anybatch.cli.planned import PlannedEngine
from anybatch.cli.progress import Gauge, Progress, step_row
from anybatch.cli.run_folder import RunFolder
from anybatch.cli.saved_run import Interrupted, Summary, epoch_line, figures
from anybatch.cli.settings import Settings
from anybatch.cli.team import SINGLE_PROCESS, Team, refuse_unequal
from anybatch.cli.views import LoadedBatch, Loader, Reading
from anybatch.devices import RNGState
from anybatch.errors import AnybatchError
from anybatch.reports import StepReport

Clock = Callable[[], float]

INCOMPLETE_STEP = "The optimizer may have made a part of its step, so the last checkpoint stands."
"""Is added to why a run has stopped."""


class TrainingRun:
    """One training run: its parts and its progress.

    `consistent` is False while an optimizer changes parameters: no checkpoint is written then.
    """

    def __init__(
        self,
        settings: Settings,
        parts: RunParts,
        folder: RunFolder,
        progress: Progress,
        clock: Clock,
        started: float,
        team: Team = SINGLE_PROCESS,
    ) -> None:
        self.settings, self.parts, self.folder = settings, parts, folder
        self.progress, self.clock, self.team = progress, clock, team
        self.train_loader = parts.loader(settings, shuffle=True, team=team)
        self.test_loader = parts.loader(settings, shuffle=False, team=team)
        optimizer = make_optimizer(parts.recipe, parts.model.parameters())
        steps = parts.recipe.epochs * len(self.train_loader)
        self.trained = Trained(
            parts.model, optimizer, make_schedule(parts.recipe, optimizer, steps)
        )
        self.norms = BatchNormPolicy(settings, min(settings.batch_size, len(parts.train)))
        self.planned = PlannedEngine(settings, parts, optimizer, self.norms, team)
        self.counts = RunCounters()
        self.part: EpochProgress | None = None
        self.config: Mapping[str, Any] | None = None
        self.begun, self.consistent = False, True
        self.reading = Reading(progress, skip_corrupt=settings.skip_corrupt, team=team)
        self.rows: list[dict[str, Any]] = []
        self.started = self.saved = self.mark = started

    def put_back(self, state: State, *, replan: Mapping[str, Any] | None = None) -> None:
        """Continue from a checkpoint's `state`: the log is cut back to it, the RNG state restored.

        The plan in it is obeyed, unless `replan` holds the config.json of the run with a new one.

        Raises:
            RunFolderError: when the checkpoint is of another model.
        """
        self.norms.put_back(state.get("norms"))
        self.planned.put_back(state["plan"], obeyed=replan is None)
        self.config = replan
        self.trained.put_back(state)
        self.counts = RunCounters(**state["counts"])
        self.counts.resumed += 1
        if state["part"] is not None:
            self.part = EpochProgress(make_metric(self.parts.data.task))
            self.part.put_back(state["part"])
        self.reading.unreadable = set(state["unreadable"])
        self.rows = self.folder.reopen(self.counts.step, self.counts.epoch)
        if self.planned.plan is not None:
            self._write_plan()
        # It is of rank 0; the others draw anew in every step.
        RNGState.from_dict(state["rng"]).put_back()

    def to_its_end(self) -> Summary:
        """Train all epochs that remain; at any end, write checkpoint and summary first."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.planned)
                self._begin()
                stack.enter_context(self.team.calm())
                self.all_epochs()
            except KeyboardInterrupt as stop:
                if self.folder.replaces():
                    raise
                if not self.begun:
                    self.folder.discard()
                    raise
                summary = self.end(interrupted=True)
                raise Interrupted(summary, terminated=isinstance(stop, Terminated)) from None
            except Exception as error:
                expected = isinstance(error, AnybatchError)
                with contextlib.suppress(Exception):  # the first error is the one to tell
                    text = in_options(str(error))
                    self.fail(text if expected else f"{type(error).__name__}: {text}")
                raise
            return self.end()

    def _begin(self) -> None:
        """Make the plan, and write it and the first checkpoint, before the first step."""
        self.begun = self.counts.resumed > 0
        if self.team.several:
            refuse_unequal(self.parts.model)
        planned = self._plan(self.counts.epoch + 1)
        with unbroken():
            if self.config is not None:
                self.folder.write_json("config.json", self.config)
            if self.config is not None or planned or not self.begun:
                self._save()
            self.begun = True

    def _plan(self, epoch: int) -> bool:
        """Plan with a mini-batch of `epoch`, if there is a plan to be made; say whether."""
        if not self.planned.waits:
            return False
        self.planned.make(self.reading.first(self.train_loader, epoch))
        self._tell_plan()
        return True

    def _tell_plan(self) -> None:
        self.progress.say(str(self.planned.plan))
        self._write_plan()

    def _write_plan(self) -> None:
        text = self.planned.text()
        assert text is not None
        self.folder.write_text("plan.json", text)
        self.folder.keep_step(self.planned.timeline())

    def all_epochs(self) -> None:
        """Train and test every epoch that is left, with a checkpoint after each."""
        epochs, model, task = self.parts.recipe.epochs, self.parts.model, self.parts.data.task
        for epoch in range(self.counts.epoch + 1, epochs + 1):
            if self._plan(epoch):
                with unbroken():
                    self._save()
            row = {"kind": "epoch", "epoch": epoch, **self._train_epoch(epoch)}
            self.team.begin(self.parts.model, self.settings.seed, self.counts.step)
            with AtomicStep(model) as step:
                engine = self.planned.engine
                row |= tested(self.reading, self.test_loader, engine, task, epoch)
                with unbroken():
                    step.done()
                    change = self._end_epoch(row)
            self.progress.say(epoch_line(row, epochs))
            if change is not None:
                self.progress.say(change)

    def _end_epoch(self, row: dict[str, Any]) -> str | None:
        """Record the end of an epoch; return the change from the next on, or None."""
        self.counts.epoch = epoch = row["epoch"]
        self.counts.train_seconds += row["seconds"]
        self.part, change = None, None
        self.rows.append({**row, "step": self.counts.step})
        self.folder.log(self.rows[-1])
        if epoch < self.parts.recipe.epochs:
            change = self.norms.measured(epoch, row["train_loss"])
        if change is not None:
            at = {"epoch": epoch, "step": self.counts.step}
            self.folder.log({"kind": "batchnorm", **at, "change": change})
            self.planned.forget()
        self._save()
        return change

    def _train_epoch(self, epoch: int) -> dict[str, Any]:
        self.parts.model.train()
        part = self.part = self.part or EpochProgress(make_metric(self.parts.data.task))
        expected = self.train_loader.micro_batches(self.planned.micro_batch, part.batches)
        self.progress.begin_epoch(epoch, self.parts.recipe.epochs, expected)
        self.mark = ready = self.clock()
        for batches, batch in self.reading.epoch(self.train_loader, epoch, part.batches):
            self._step(epoch, part, batch, batches, self.clock() - ready)
            if self.clock() - self.saved >= 60 * self.settings.checkpoint_minutes:
                with unbroken():
                    self._save()
                self.mark = self.clock()
            ready = self.clock()
        return part.figures()

    def _step(
        self, epoch: int, part: EpochProgress, batch: LoadedBatch, batches: int, waited: float
    ) -> None:
        """Take one optimizer step with the gradient of the full batch, after `waited` seconds."""
        local_metric = self.team.rank_metric(
            part.metric, partial(make_metric, self.parts.data.task)
        )

        def observe(outputs: Tensor, targets: Tensor) -> None:
            local_metric.update(outputs, targets)
            self.progress.micro_batch(len(targets) * self.team.size)  # each rank does as many
            self.team.heed()

        started = self.clock()
        optimizer = self.trained.optimizer
        lr = optimizer.param_groups[0]["lr"]
        self.team.begin(self.parts.model, self.settings.seed, self.counts.step)
        with AtomicStep(self.parts.model, part.metric) as step:
            optimizer.zero_grad()
            loss = float(self.planned.engine.backward(batch.inputs, batch.targets, observe=observe))
            computed = self.clock() - started
            refuse_not_finite(loss, self.counts.step + 1, epoch)
            self.team.add(part.metric, local_metric)
            with unbroken():
                self.consistent = False  # a failed optimizer has stepped some parameters
                optimizer.step()
                self.trained.schedule.step()
                step.done()
                self.consistent = True
                report = self._count(part, batches, loss)
                at = {"epoch": epoch, "step": self.counts.step, "loss": loss, "lr": lr}
                self.folder.log(step_row(at, report, self.clock() - started, computed, waited))
                if self.counts.step == 1:
                    self.folder.keep()
                if self.planned.follow(batch):
                    self._tell_plan()
        held = Gauge.of(report.peak_bytes, report.predicted_bytes, self.planned.budget)
        self.progress.step(loss, held)

    def _count(self, part: EpochProgress, batches: int, loss: float) -> StepReport:
        report = self.planned.engine.last
        assert report is not None
        now = self.clock()
        part.seconds += now - self.mark
        self.mark = now
        part.batches = batches
        part.images += report.samples
        part.loss += loss * report.samples
        self.counts.images += report.samples
        self.counts.step += 1
        return report

    def _save(self) -> None:
        self.saved = self.clock()
        seconds = self.counts.seconds + self.saved - self.started
        part = self.part if self.part is not None and self.part.batches else None
        self.folder.save_checkpoint(
            {
                "format": checkpoint.FORMAT,
                **self.trained.state(copies=self.planned.pages),
                "epoch": self.counts.epoch,
                "step": self.counts.step,
                "counts": {**dataclasses.asdict(self.counts), "seconds": seconds},
                "part": part.state() if part is not None else None,
                "rng": RNGState.now().to_dict(),
                "plan": self.planned.text(),
                "norms": self.norms.state(),
                "unreadable": sorted(self.reading.unreadable),
                "seed": self.settings.seed,
            }
        )

    def fail(self, reason: str) -> None:
        """Save the trained state and the reason of the stop; discard a new run without a step."""
        if self.counts.step or (self.counts.resumed and not self.folder.replaces()):
            self.end(stopped=reason)
        else:
            self.folder.discard()

    def end(self, *, interrupted: bool = False, stopped: str | None = None) -> Summary:
        """Write checkpoint and summary, and return the summary.

        If there is no space for the checkpoint, the summary is still written. If the optimizer has
        failed during its step, the last checkpoint remains.
        """
        if stopped and not self.consistent:
            stopped = f"{stopped} {INCOMPLETE_STEP}"
        summary = self._summary(interrupted=interrupted, stopped=stopped)
        with unbroken():
            try:
                if (interrupted or stopped) and self.consistent:
                    self._save()
            finally:
                self.folder.close(dataclasses.asdict(summary))
        return dataclasses.replace(summary, report=self.folder.extras.get("report"))

    def _summary(self, *, interrupted: bool, stopped: str | None) -> Summary:
        parts, settings, counts = self.parts, self.settings, self.counts
        plan = self.planned.engine.plan
        train_seconds = counts.train_seconds + (self.part.seconds if self.part is not None else 0)
        return Summary(
            **circumstances(settings, parts, self.team),
            **figures(self.rows, make_metric(parts.data.task).name),
            epochs=counts.epoch,
            steps=counts.step,
            micro_batch=self.planned.micro_batch,
            images=counts.images,
            seconds=counts.seconds + self.clock() - self.started,
            train_seconds=train_seconds,
            images_per_second=counts.images / max(train_seconds, 1e-9),
            exact_from=self.norms.exact_from,
            exact=str(plan.exact) if plan is not None and counts.step else None,
            skipped=len(self.reading.unreadable),
            resumed=counts.resumed,
            interrupted=interrupted,
            stopped=stopped,
        )


# Test half of an epoch: a metric over all test samples, and their loss.


def tested(
    reading: Reading, loader: Loader, engine: Engine, task: str, epoch: int
) -> dict[str, Any]:
    """Return the metric over all samples of all ranks, and the loss averaged over mini-batches.

    A coupled loss, such as BCE + Dice, has no exact value that does not hold all outputs. The model
    of `engine` must be in the mode of the test.
    """
    engine.model.eval()
    engine.model.zero_grad()  # the next step begins without them, and here is room for the test
    metric = make_metric(task)
    local_metric = reading.team.rank_metric(metric, partial(make_metric, task))
    total, images = 0.0, 0
    for _, batch in reading.epoch(loader, epoch):
        loss = engine.evaluate(batch.inputs, batch.targets, observe=local_metric.update)
        assert engine.last is not None
        total += float(loss) * engine.last.samples
        images += engine.last.samples
    reading.team.add(metric, local_metric)
    return {"test_loss": total / images, f"test_{metric.name}": metric.value()}
