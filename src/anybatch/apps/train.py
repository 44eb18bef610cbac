"""Train a model on a data set in mini-batches of any size: the library function behind the command.

A training loop of torch's own would hold the mini-batch on the device at once. This one keeps it on
the host and hands it to the engine, which streams it; all else is an ordinary loop:

    for batch in epoch:
        optimizer.zero_grad()
        loss = engine.backward(batch)      all micro-batches, one after another
        optimizer.step()
        schedule.step()

Nothing is left half done: an interrupt waits for the optimizer's step and for a file's last byte,
and whatever ends a run early, a checkpoint of its last whole step and a summary are written.

Source: MBS, Algorithm 1 and section 4.2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from anybatch import AnybatchError, Engine
from anybatch.apps.build import Parts, build, describe, seeded
from anybatch.apps.data import corrupt
from anybatch.apps.faults import DataError, RunFolderError, TrainingError
from anybatch.apps.interrupts import unbroken
from anybatch.apps.metrics import Metric, make_metric
from anybatch.apps.progress import Progress, Silent
from anybatch.apps.recipes import make_optimizer, make_schedule
from anybatch.apps.run_folder import RunFolder
from anybatch.apps.settings import Settings
from anybatch.apps.summary import Interrupted, Summary, versions
from anybatch.apps.views import Batch, Loader


def train(settings: Settings, progress: Progress | None = None) -> Summary:
    """Train as `settings` say, write the run folder, and return how it went.

    With one seed and one number of threads two runs on a CPU give the same weights bit for bit.

    Raises:
        AnybatchError: when settings, data, model or run folder cannot be used, or the loss is no
            longer a finite number; after the first step, with checkpoint and summary written.
        Interrupted: on Ctrl-C, likewise; a KeyboardInterrupt that carries the summary.
        KeyboardInterrupt: on Ctrl-C when no step was taken and an earlier run was put back.
    """
    shown = progress if progress is not None else Silent()
    folder = RunFolder(settings.out, overwrite=settings.overwrite)
    started = time.perf_counter()
    with seeded(settings.seed, settings.threads):
        parts = build(settings)
        try:
            folder.open(describe(settings, parts))
            for note in parts.data.notes:
                shown.say(note)
            return Run(settings, parts, folder, shown, started).to_its_end()
        except BaseException:
            folder.give_way()
            raise
        finally:
            shown.close()


class Run:
    """One training run: what it is made of and how far it has come."""

    def __init__(
        self,
        settings: Settings,
        parts: Parts,
        folder: RunFolder,
        progress: Progress,
        started: float,
    ) -> None:
        self.settings, self.parts, self.folder, self.progress = settings, parts, folder, progress
        self.train_loader = parts.loader(settings, shuffle=True)
        self.test_loader = parts.loader(settings, shuffle=False)
        self.optimizer = make_optimizer(parts.recipe, parts.model.parameters())
        steps = parts.recipe.epochs * len(self.train_loader)
        self.schedule = make_schedule(parts.recipe, self.optimizer, steps)
        self.engine = Engine(
            parts.model,
            parts.loss,
            optimizer=self.optimizer,
            micro_batch=settings.micro_batch,
            batchnorm=settings.batchnorm,
        )
        self.started = started
        self.train_seconds = 0.0
        self.epoch = self.steps = self.images = 0
        self.unreadable: set[str] = set()
        self.rows: list[dict[str, Any]] = []

    def to_its_end(self) -> Summary:
        """Train every epoch; whatever ends it early, write checkpoint and summary first."""
        try:
            self.all_epochs()
        except KeyboardInterrupt:
            if self.folder.replaces():
                raise
            raise Interrupted(self.end(interrupted=True)) from None
        except AnybatchError as error:
            with contextlib.suppress(RunFolderError):
                self.fail(str(error))
            raise
        return self.end()

    def all_epochs(self) -> None:
        """Train and test every epoch, with a checkpoint after each."""
        for epoch in range(1, self.parts.recipe.epochs + 1):
            row = {"kind": "epoch", "epoch": epoch, **self._train_epoch(epoch)}
            row |= self._test(epoch)
            with unbroken():
                self.epoch = epoch
                self.rows.append({**row, "step": self.steps})
                self.folder.log(self.rows[-1])
                self._save()
            self.progress.say(_line(self.rows[-1], self.parts.recipe.epochs))

    def _train_epoch(self, epoch: int) -> dict[str, Any]:
        self.parts.model.train()
        metric = make_metric(self.parts.data.task)
        expected = self.train_loader.micro_batches(self.settings.micro_batch)
        self.progress.begin_epoch(epoch, self.parts.recipe.epochs, expected)
        total, images, started = 0.0, 0, time.perf_counter()
        try:
            for batch in self._readable(self.train_loader, epoch):
                loss = self._step(epoch, batch, metric)
                total += loss * len(batch.inputs)
                images += len(batch.inputs)
        finally:
            seconds = time.perf_counter() - started
            self.train_seconds += seconds
        return {
            "metric": metric.name,
            "train_loss": total / images,
            f"train_{metric.name}": metric.value(),
            "seconds": seconds,
            "images_per_second": images / seconds,
        }

    def _step(self, epoch: int, batch: Batch, metric: Metric) -> float:
        """Take one optimizer step with the gradient of the whole mini-batch; return its loss."""

        def observe(outputs: Tensor, targets: Tensor) -> None:
            metric.update(outputs, targets)
            self.progress.micro_batch(len(targets))

        started = time.perf_counter()
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.zero_grad()
        loss = float(self.engine.backward(batch.inputs, batch.targets, observe=observe))
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss must be a finite number; got {loss} in step {self.steps + 1} of epoch "
                f"{epoch}. The weights are those before that step; try a smaller --lr."
            )
        with unbroken():
            self.optimizer.step()
            self.schedule.step()
            self.steps += 1
            self.images += len(batch.inputs)
            if self.steps == 1:
                self.folder.keep()
        seconds = time.perf_counter() - started
        self.progress.step(loss)
        report = self.engine.last
        assert report is not None
        if self.steps == 1 and self.engine.plan is not None:
            self.progress.say(str(self.engine.plan))
            self.folder.write_text("plan.json", self.engine.plan.to_json() + "\n")
        self.folder.log(
            {
                "kind": "step",
                "epoch": epoch,
                "step": self.steps,
                "loss": loss,
                "lr": lr,
                "samples": len(batch.inputs),
                "micro_batches": report.micro_batches,
                "peak_bytes": report.peak_bytes,
                "seconds": seconds,
                "images_per_second": len(batch.inputs) / seconds,
            }
        )
        return loss

    def _test(self, epoch: int) -> dict[str, Any]:
        """Return the metric over the whole test set, and its loss averaged over mini-batches.

        A coupled loss, such as BCE + Dice, has no exact value that does not hold all outputs.
        """
        self.parts.model.eval()
        metric = make_metric(self.parts.data.task)
        total, images = 0.0, 0
        for batch in self._readable(self.test_loader, epoch):
            loss = self.engine.evaluate(batch.inputs, batch.targets, observe=metric.update)
            total += float(loss) * len(batch.inputs)
            images += len(batch.inputs)
        return {"test_loss": total / images, f"test_{metric.name}": metric.value()}

    def _readable(self, loader: Loader, epoch: int) -> Iterator[Batch]:
        """Yield the mini-batches that have a sample; stop at a broken file, or count it."""
        empty = True
        for batch in loader.epoch(epoch):
            if batch.unreadable and not self.settings.skip_corrupt:
                raise corrupt(batch.unreadable)
            for found in batch.unreadable:
                if found.path not in self.unreadable:
                    self.unreadable.add(found.path)
                    self.progress.say(f"skipped {found.path}: {found.reason}")
            if len(batch.inputs):
                empty = False
                yield batch
        if empty:
            raise DataError(
                "no sample of an epoch could be read: all were skipped. Check the files."
            )

    def _save(self) -> None:
        self.folder.save_checkpoint(
            {
                "model": self.parts.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "epoch": self.epoch,
                "step": self.steps,
                "rng": torch.get_rng_state(),
                "seed": self.settings.seed,
            }
        )

    def fail(self, reason: str) -> None:
        """Save what was trained and say why it stopped; before the first step leave nothing."""
        if self.steps:
            self.end(stopped=reason)
        else:
            self.folder.discard()

    def end(self, *, interrupted: bool = False, stopped: str | None = None) -> Summary:
        """Write checkpoint and summary, and return the summary."""
        summary = self._summary(interrupted=interrupted, stopped=stopped)
        with unbroken():
            if interrupted or stopped:
                self._save()
            self.folder.close(dataclasses.asdict(summary))
        return summary

    def _summary(self, *, interrupted: bool, stopped: str | None) -> Summary:
        name = make_metric(self.parts.data.task).name
        empty = {f"test_{name}": None, f"train_{name}": None, "epoch": None, "test_loss": None}
        best = max(self.rows, key=lambda row: row[f"test_{name}"], default=empty)
        last = self.rows[-1] if self.rows else empty
        parts, settings = self.parts, self.settings
        return Summary(
            metric=name,
            best=best[f"test_{name}"],
            best_epoch=best["epoch"],
            last=last[f"test_{name}"],
            train_last=last[f"train_{name}"],
            last_loss=last["test_loss"],
            epochs=self.epoch,
            steps=self.steps,
            batch_size=settings.batch_size,
            micro_batch=settings.micro_batch,
            images=self.images,
            seconds=time.perf_counter() - self.started,
            train_seconds=self.train_seconds,
            images_per_second=self.images / max(self.train_seconds, 1e-9),
            model=parts.recipe.model,
            parameters=sum(parameter.numel() for parameter in parts.model.parameters()),
            train_samples=len(parts.data.train),
            test_samples=len(parts.data.test),
            skipped=len(self.unreadable),
            seed=settings.seed,
            threads=torch.get_num_threads(),
            device=str(parts.device),
            versions=versions(),
            interrupted=interrupted,
            stopped=stopped,
            run_folder=None if settings.out is None else str(settings.out),
        )


def _line(row: Mapping[str, Any], epochs: int) -> str:
    metric = row["metric"]
    return (
        f"epoch {row['epoch']}/{epochs}: loss {row['train_loss']:.4f}, "
        f"test loss {row['test_loss']:.4f}, test {metric} {row[f'test_{metric}']:.4f}, "
        f"{row['images_per_second']:,.0f} images/s"
    )
