"""Train a model on a data set in mini-batches of any size: the library function behind the command.

A training loop of torch's own would hold the mini-batch on the device at once. This one keeps it on
the host and hands it to the engine, which streams it; all else is an ordinary loop, in `run`.

Nothing is left half done: an interrupt waits for the optimizer's step and for a file's last byte,
and whatever ends a run early, a checkpoint of its last whole step is there. `resume` goes on from
it, and comes to the same weights bit for bit as if nothing had happened.

Source: MBS, Algorithm 1 and section 4.2.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from anybatch.apps.build import build, describe, seeded
from anybatch.apps.checkpoint import check_format
from anybatch.apps.faults import SettingsError
from anybatch.apps.progress import Progress, Silent
from anybatch.apps.run import Clock, Run
from anybatch.apps.run_folder import RunFolder
from anybatch.apps.saved_run import SavedRun
from anybatch.apps.settings import Settings
from anybatch.apps.summary import Summary

REPLANNED = (
    "the plan is made anew: the end is that of the unbroken run up to rounding, not bit for bit"
)
NOTHING: Mapping[str, Any] = MappingProxyType({})


def train(
    settings: Settings, progress: Progress | None = None, *, clock: Clock = time.perf_counter
) -> Summary:
    """Train as `settings` say, write the run folder, and return how it went.

    With one seed and one number of threads two runs on a CPU give the same weights bit for bit.
    `clock` returns seconds; it says when a checkpoint within an epoch is due.

    Raises:
        AnybatchError: when settings, data, model or run folder cannot be used, or the loss is no
            longer a finite number; after the first step, with checkpoint and summary written.
        Interrupted: on Ctrl-C, likewise; a KeyboardInterrupt that carries the summary.
        KeyboardInterrupt: on Ctrl-C when no step was taken and an earlier run was put back.
    """
    shown = progress if progress is not None else Silent()
    folder = RunFolder(settings.out, overwrite=settings.overwrite)
    started = clock()
    try:
        with seeded(settings.seed, settings.threads):
            parts = build(settings)
            folder.open(describe(settings, parts))
            for note in parts.data.notes:
                shown.say(note)
            return Run(settings, parts, folder, shown, clock, started).to_its_end()
    except BaseException:
        folder.give_way()
        raise
    finally:
        folder.release()
        shown.close()


def resume(
    path: Path,
    given: Mapping[str, Any] = NOTHING,
    progress: Progress | None = None,
    *,
    replan: bool = False,
    clock: Clock = time.perf_counter,
) -> Summary:
    """Go on with the run in the folder `path` from its last checkpoint, and return how it went.

    However it was stopped, on a CPU the end is that of the unbroken run, bit for bit, with the same
    versions and threads; a warning is shown where they differ. A run that came to its end is left
    as it is. `given` are fields of `Settings` that were named: those that may differ (device,
    threads, workers, checkpoint_minutes) are used, others must be what they were. With `replan` the
    plan is made anew, of another memory or micro_batch too; the last bits may then be others.

    Raises:
        AnybatchError: as `train`; when there is no checkpoint or it is broken; when another process
            trains in the folder; when settings or data are not those of the run.
        Interrupted: as `train`.
    """
    shown = progress if progress is not None else Silent()
    saved = SavedRun.read(path)
    settings = saved.settings(given, replan=replan)
    if replan and not settings.planned:
        raise SettingsError(
            "replan needs something to plan; the run keeps to micro-batches of "
            f"{settings.micro_batch} and has no budget. Name one with --memory, or leave --replan "
            "out."
        )
    folder = RunFolder(path, resumed=True)
    started = clock()
    try:
        folder.lock()
        finished = saved.finished()
        if finished is not None:
            shown.say(f"the run in {path} came to its end; there is nothing to resume")
            return finished
        state = folder.load_checkpoint()
        check_format(state)
        with seeded(settings.seed, settings.threads):
            parts = build(settings)
            now = describe(settings, parts)
            saved.refuse_other(now)
            for warning in saved.warnings(now):
                shown.say(warning)
            run = Run(settings, parts, folder, shown, clock, started)
            config = {**saved.config, "settings": now["settings"]} if replan else None
            run.put_back(state, replan=config)
            shown.say(f"resumed after step {run.counts.step}, in epoch {run.counts.epoch + 1}")
            if replan:
                shown.say(REPLANNED)
            return run.to_its_end()
    except BaseException:
        folder.give_way()
        raise
    finally:
        folder.release()
        shown.close()
