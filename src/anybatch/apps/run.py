"""A training run: its loop, and how it comes to an end that another process can go on from.

    for batch in epoch:
        optimizer.zero_grad()
        loss = engine.backward(batch)      all micro-batches, one after another
        optimizer.step()
        schedule.step()

A step is whole or has not happened; a checkpoint, whenever it is written, is of a whole step. There
is one before the first step, one after every epoch, one when the last is some minutes old, and one
when an interrupt or an error ends the run.

Source: MBS, Algorithm 1 and section 4.2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from anybatch import AnybatchError, StepReport
from anybatch.apps import allocator, checkpoint
from anybatch.apps.build import Parts
from anybatch.apps.checkpoint import Counts, Part, State, Trained, WholeStep
from anybatch.apps.faults import TrainingError
from anybatch.apps.interrupts import Terminated, unbroken
from anybatch.apps.metrics import make_metric
from anybatch.apps.planned import Planned
from anybatch.apps.progress import Gauge, Progress
from anybatch.apps.reading import Reading
from anybatch.apps.recipes import make_optimizer, make_schedule
from anybatch.apps.run_folder import RunFolder
from anybatch.apps.settings import Settings
from anybatch.apps.summary import Interrupted, Summary, epoch_line, figures, versions
from anybatch.apps.views import Batch

Clock = Callable[[], float]


class Run:
    """One training run: what it is made of and how far it has come."""

    def __init__(
        self,
        settings: Settings,
        parts: Parts,
        folder: RunFolder,
        progress: Progress,
        clock: Clock,
        started: float,
    ) -> None:
        self.settings, self.parts, self.folder = settings, parts, folder
        self.progress, self.clock = progress, clock
        self.train_loader = parts.loader(settings, shuffle=True)
        self.test_loader = parts.loader(settings, shuffle=False)
        optimizer = make_optimizer(parts.recipe, parts.model.parameters())
        steps = parts.recipe.epochs * len(self.train_loader)
        self.trained = Trained(
            parts.model, optimizer, make_schedule(parts.recipe, optimizer, steps)
        )
        self.planned = Planned(settings, parts, optimizer)
        self.counts = Counts()
        self.part: Part | None = None
        self.config: Mapping[str, Any] | None = None
        self.begun = False
        self.reading = Reading(progress, skip_corrupt=settings.skip_corrupt)
        self.rows: list[dict[str, Any]] = []
        self.started = self.saved = self.mark = started

    def put_back(self, state: State, *, replan: Mapping[str, Any] | None = None) -> None:
        """Go on from a checkpoint's `state`: the log is cut back to it, the dice lie as they did.

        The plan in it is obeyed, unless `replan` holds the config.json of the run with a new one.

        Raises:
            RunFolderError: when the checkpoint is of another model.
        """
        self.planned.put_back(state["plan"], obeyed=replan is None)
        self.config = replan
        self.trained.put_back(state)
        self.counts = Counts(**state["counts"])
        self.counts.resumed += 1
        if state["part"] is not None:
            self.part = Part(make_metric(self.parts.data.task))
            self.part.put_back(state["part"])
        self.reading.unreadable = set(state["unreadable"])
        self.rows = self.folder.reopen(self.counts.step, self.counts.epoch)
        if self.planned.plan is not None:
            self._write_plan()
        checkpoint.put_dice_back(state["dice"])

    def to_its_end(self) -> Summary:
        """Train every epoch that is left; whatever ends it, write checkpoint and summary first."""
        try:
            self._begin()
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
            known = isinstance(error, AnybatchError)
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self.fail(str(error) if known else f"{type(error).__name__}: {error}")
            raise
        return self.end()

    def _begin(self) -> None:
        """Make the plan, and write it and the first checkpoint, before the first step."""
        self.begun = self.counts.resumed > 0
        if self.planned.waits:
            _, batch = next(self.reading.epoch(self.train_loader, self.counts.epoch + 1))
            self.planned.make(batch)
            self._tell_plan()
        with unbroken():
            if self.config is not None:
                self.folder.write_json("config.json", self.config)
            if self.config is not None or not self.begun:
                self._save()
            self.begun = True

    def _tell_plan(self) -> None:
        self.progress.say(str(self.planned.plan))
        self._write_plan()

    def _write_plan(self) -> None:
        text = self.planned.text()
        assert text is not None
        self.folder.write_text("plan.json", text)

    def all_epochs(self) -> None:
        """Train and test every epoch that is left, with a checkpoint after each."""
        for epoch in range(self.counts.epoch + 1, self.parts.recipe.epochs + 1):
            row = {"kind": "epoch", "epoch": epoch, **self._train_epoch(epoch)}
            with WholeStep(self.parts.model) as tested:
                row |= self._test(epoch)
                with unbroken():
                    tested.done()
                    self.counts.epoch = epoch
                    self.counts.train_seconds += row["seconds"]
                    self.part = None
                    self.rows.append({**row, "step": self.counts.step})
                    self.folder.log(self.rows[-1])
                    self._save()
            self.progress.say(epoch_line(self.rows[-1], self.parts.recipe.epochs))

    def _train_epoch(self, epoch: int) -> dict[str, Any]:
        self.parts.model.train()
        part = self.part = self.part or Part(make_metric(self.parts.data.task))
        expected = self.train_loader.micro_batches(self.planned.micro_batch, part.batches)
        self.progress.begin_epoch(epoch, self.parts.recipe.epochs, expected)
        self.mark = self.clock()
        for batches, batch in self.reading.epoch(self.train_loader, epoch, part.batches):
            self._step(epoch, part, batch, batches)
            if self.clock() - self.saved >= 60 * self.settings.checkpoint_minutes:
                with unbroken():
                    self._save()
                self.mark = self.clock()
        return {
            "metric": part.metric.name,
            "train_loss": part.loss / part.images,
            f"train_{part.metric.name}": part.metric.value(),
            "seconds": part.seconds,
            "images_per_second": part.images / max(part.seconds, 1e-9),
        }

    def _step(self, epoch: int, part: Part, batch: Batch, batches: int) -> None:
        """Take one optimizer step with the gradient of the whole mini-batch."""

        def observe(outputs: Tensor, targets: Tensor) -> None:
            part.metric.update(outputs, targets)
            self.progress.micro_batch(len(targets))

        started = self.clock()
        optimizer = self.trained.optimizer
        lr = optimizer.param_groups[0]["lr"]
        with WholeStep(self.parts.model, part.metric) as step:
            optimizer.zero_grad()
            loss = float(self.planned.engine.backward(batch.inputs, batch.targets, observe=observe))
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss must be a finite number; got {loss} in step {self.counts.step + 1} "
                    f"of epoch {epoch}. The weights are those before that step; try a smaller --lr."
                )
            with unbroken():
                optimizer.step()
                self.trained.schedule.step()
                step.done()
                self._count(part, len(batch.inputs), batches, loss)
                report = self._log_step(epoch, loss, lr, self.clock() - started)
                if self.planned.follow(batch):
                    self._tell_plan()
        held = Gauge.of(report.peak_bytes, report.predicted_bytes, self.planned.budget)
        self.progress.step(loss, held)

    def _count(self, part: Part, images: int, batches: int, loss: float) -> None:
        now = self.clock()
        part.seconds += now - self.mark
        self.mark = now
        part.batches = batches
        part.images += images
        part.loss += loss * images
        self.counts.images += images
        self.counts.step += 1

    def _log_step(self, epoch: int, loss: float, lr: float, seconds: float) -> StepReport:
        report = self.planned.engine.last
        assert report is not None
        self.folder.log(
            {
                "kind": "step",
                "epoch": epoch,
                "step": self.counts.step,
                "loss": loss,
                "lr": lr,
                "samples": report.samples,
                "micro_batches": report.micro_batches,
                "peak_bytes": report.peak_bytes,
                "seconds": seconds,
                "images_per_second": report.samples / max(seconds, 1e-9),
            }
        )
        if self.counts.step == 1:
            self.folder.keep()
        return report

    def _test(self, epoch: int) -> dict[str, Any]:
        """Return the metric over the whole test set, and its loss averaged over mini-batches.

        A coupled loss, such as BCE + Dice, has no exact value that does not hold all outputs.
        """
        self.parts.model.eval()
        metric = make_metric(self.parts.data.task)
        total, images = 0.0, 0
        for _, batch in self.reading.epoch(self.test_loader, epoch):
            loss = self.planned.engine.evaluate(batch.inputs, batch.targets, observe=metric.update)
            total += float(loss) * len(batch.inputs)
            images += len(batch.inputs)
        return {"test_loss": total / images, f"test_{metric.name}": metric.value()}

    def _save(self) -> None:
        self.saved = self.clock()
        seconds = self.counts.seconds + self.saved - self.started
        part = self.part if self.part is not None and self.part.batches else None
        self.folder.save_checkpoint(
            {
                "format": checkpoint.FORMAT,
                **self.trained.state(),
                "epoch": self.counts.epoch,
                "step": self.counts.step,
                "counts": {**dataclasses.asdict(self.counts), "seconds": seconds},
                "part": part.state() if part is not None else None,
                "dice": checkpoint.dice(),
                "plan": self.planned.text(),
                "unreadable": sorted(self.reading.unreadable),
                "seed": self.settings.seed,
            }
        )

    def fail(self, reason: str) -> None:
        """Save what was trained and say why it stopped; a new run without a step leaves nothing."""
        if self.counts.step or (self.counts.resumed and not self.folder.replaces()):
            self.end(stopped=reason)
        else:
            self.folder.discard()

    def end(self, *, interrupted: bool = False, stopped: str | None = None) -> Summary:
        """Write checkpoint and summary, and return the summary.

        Where there is no room for the checkpoint, the summary is still written.
        """
        summary = self._summary(interrupted=interrupted, stopped=stopped)
        with unbroken():
            try:
                if interrupted or stopped:
                    self._save()
            finally:
                self.folder.close(dataclasses.asdict(summary))
        return summary

    def _summary(self, *, interrupted: bool, stopped: str | None) -> Summary:
        parts, settings, counts = self.parts, self.settings, self.counts
        train_seconds = counts.train_seconds + (self.part.seconds if self.part is not None else 0)
        return Summary(
            **figures(self.rows, make_metric(parts.data.task).name),
            epochs=counts.epoch,
            steps=counts.step,
            batch_size=settings.batch_size,
            micro_batch=self.planned.micro_batch,
            images=counts.images,
            seconds=counts.seconds + self.clock() - self.started,
            train_seconds=train_seconds,
            images_per_second=counts.images / max(train_seconds, 1e-9),
            model=parts.recipe.model,
            parameters=sum(parameter.numel() for parameter in parts.model.parameters()),
            train_samples=len(parts.data.train),
            test_samples=len(parts.data.test),
            skipped=len(self.reading.unreadable),
            seed=settings.seed,
            threads=torch.get_num_threads(),
            device=str(parts.device),
            malloc=allocator.running(os.environ),
            versions=versions(),
            resumed=counts.resumed,
            interrupted=interrupted,
            stopped=stopped,
            run_folder=None if settings.out is None else str(settings.out),
        )
