"""Train a model on a data set in mini-batches of any size: the command, and its library functions.

A training loop of torch's own would hold the mini-batch on the device at once. This one keeps it on
the host and hands it to the engine, which streams it; all else is an ordinary loop, in `run`.

Nothing is left half done: an interrupt waits for the optimizer's step and for a file's last byte,
and after any early end there is a checkpoint of its last full step. `resume` continues from it, and
reaches the same weights bit for bit as an unbroken run.

Source: MBS, Algorithm 1 and section 4.2.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import typer
from rich.console import Console

from anybatch.cli.build import build, describe, seeded
from anybatch.cli.checkpoint import checked
from anybatch.cli.compare import compare
from anybatch.cli.devices import allocate
from anybatch.cli.faults import SettingsError, terminable
from anybatch.cli.options import settings_of
from anybatch.cli.outcome import ending, summary_table
from anybatch.cli.progress import Progress, make_progress
from anybatch.cli.run import Clock, TrainingRun
from anybatch.cli.run_folder import RunFolder
from anybatch.cli.saved_run import SavedRun, Summary
from anybatch.cli.settings import Settings
from anybatch.cli.team import SINGLE_PROCESS, Team

REPLANNED = (
    "the plan is made anew: the end is that of the unbroken run up to rounding, not bit for bit"
)
RERANKED = (
    "ranks were {} and are {}: each has other samples now, and the end is that of the unbroken run "
    "up to rounding, not bit for bit"
)
NOTHING: Mapping[str, Any] = MappingProxyType({})


def train(
    settings: Settings,
    progress: Progress | None = None,
    *,
    clock: Clock = time.perf_counter,
    team: Team = SINGLE_PROCESS,
) -> Summary:
    """Train as `settings` say, write the run folder, and return how it went.

    With one seed and one number of threads two runs on a CPU give the same weights bit for bit.
    `clock` returns seconds; it says when a checkpoint within an epoch is due. `team` are the ranks
    that share each mini-batch, of which this process is one; all must call this, and the first has
    progress and run folder.

    Raises:
        AnybatchError: when settings, data, model or run folder cannot be used, or the loss is no
            longer a finite number; after the first step, with checkpoint and summary written.
        Interrupted: on Ctrl-C, likewise; a KeyboardInterrupt that carries the summary.
        KeyboardInterrupt: on Ctrl-C when no step was made and an earlier run was restored.
    """
    shown = progress if progress is not None and team.leads else Progress()
    out = settings.out if team.leads else None
    folder = team.together(lambda: RunFolder(out, overwrite=settings.overwrite))
    started = clock()
    try:
        with seeded(settings.seed, settings.threads):
            parts = team.together(lambda: build(settings, team))
            team.together(lambda: folder.open(describe(settings, parts, team)))
            for note in parts.data.notes:
                shown.say(note)
            return TrainingRun(settings, parts, folder, shown, clock, started, team).to_its_end()
    except BaseException:
        folder.give_way()
        raise
    finally:
        folder.release()
        shown.close()


def resume(
    path: Path,
    requested: Mapping[str, Any] = NOTHING,
    progress: Progress | None = None,
    *,
    replan: bool = False,
    clock: Clock = time.perf_counter,
    team: Team = SINGLE_PROCESS,
) -> Summary:
    """Go on with the run in the folder `path` from its last checkpoint, and return how it went.

    However it was stopped, on a CPU the end is that of the unbroken run, bit for bit, with the same
    versions and threads; a warning is shown if they differ. A run that has ended is not changed.
    `requested` are the named fields of `Settings`: those that may differ (device, threads, workers,
    checkpoint_minutes) are used, others must be unchanged. With `replan` the plan is made anew, for
    another memory or micro_batch too; the last bits may then differ, as with another number of
    ranks. `clock` and `team` are as for `train`.

    Raises:
        AnybatchError: as `train`; when there is no checkpoint or it is broken; when another process
            trains in the folder; when settings or data are not those of the run.
        Interrupted: as `train`.
    """
    shown = progress if progress is not None and team.leads else Progress()
    saved = team.from_first(lambda: SavedRun.read(path))
    settings = saved.settings(requested, replan=replan)
    folder = team.together(lambda: RunFolder(path if team.leads else None, resumed=True))
    started = clock()
    try:
        team.together(folder.lock)
        state = team.from_first(folder.load_checkpoint)
        finished = team.from_first(saved.finished)
        if finished is not None:
            shown.say(f"the run in {path} came to its end; there is nothing to resume")
            return finished
        team.together(lambda: checked(state))
        with seeded(settings.seed, settings.threads):
            parts = team.together(lambda: build(settings, team))
            now = describe(settings, parts, team)
            team.together(lambda: saved.refuse_other(now))
            for warning in saved.warnings(now):
                shown.say(warning)
            run = TrainingRun(settings, parts, folder, shown, clock, started, team)
            anew = replan or saved.ranks != team.size
            config = {**saved.config, **{part: now[part] for part in ("settings", "process")}}
            team.together(lambda: run.put_back(state, replan=config if anew else None))
            shown.say(f"resumed after step {run.counts.step}, in epoch {run.counts.epoch + 1}")
            if anew:
                shown.say(REPLANNED if replan else RERANKED.format(saved.ranks, team.size))
            return run.to_its_end()
    except BaseException:
        folder.give_way()
        raise
    finally:
        folder.release()
        shown.close()


def command(context: typer.Context, options: SimpleNamespace) -> None:
    """Train, resume or compare as the options say, and print the outcome."""
    team = Team.here()
    console = Console(quiet=not team.leads)
    with team, ending(team), terminable():
        if options.compare:
            team.refuse("compare")
        _refuse_together(options)
        budgeted = options.memory is not None or (
            options.resume is not None and SavedRun.read(options.resume).budgeted
        )
        allocated = allocate(context, options.malloc, options.device, budgeted=budgeted)
        console.print(allocated, highlight=False, soft_wrap=not console.is_terminal)
        team.meet(options.device)
        settings = settings_of(
            options, out=options.out or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")
        )
        if options.compare:
            console.print(compare(settings, options.compare_steps))
            return
        progress = make_progress(console)
        if options.resume is None:
            summary = train(settings, progress, team=team)
        else:
            named = _named_settings(context, settings)
            summary = resume(options.resume, named, progress, replan=options.replan, team=team)
        console.print(summary_table(summary))
        if summary.skipped:
            plural = ("file", "was") if summary.skipped == 1 else ("files", "were")
            console.print(
                f"{summary.skipped} {plural[0]} could not be read and {plural[1]} skipped."
            )


def _refuse_together(options: SimpleNamespace) -> None:
    """Refuse options that exclude each other.

    Raises:
        SettingsError: naming them.
    """
    if options.replan and options.resume is None:
        raise SettingsError(
            "replan needs a run whose plan is made anew; --resume was not given. Add --resume RUN, "
            "or leave --replan out: a new run is always planned."
        )
    if options.compare and options.resume is not None:
        raise SettingsError(
            "compare needs trainings from their first step; --resume was given too. Leave one out."
        )
    usual = {"offload": "auto", "states": None, "spill": None}
    requested = ((name, getattr(options, name)) for name in usual)
    left = [f"--{name} {value}" for name, value in requested if value != usual[name]]
    if options.compare and left:
        raise SettingsError(
            "compare trains with everything in memory, as a loop by hand does; "
            f"{', '.join(left)} was given too. Leave it out."
        )


def _named_settings(context: typer.Context, settings: Settings) -> dict[str, Any]:
    """Return the settings that were named on the command line."""
    names = {field.name for field in dataclasses.fields(Settings)}
    return {
        name: getattr(settings, name)
        for name in context.params
        if name in names
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
