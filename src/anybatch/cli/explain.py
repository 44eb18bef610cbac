"""Commands `anybatch plan`, `why` and `check`: forecasts of training, and test of exactness.

All use the first mini-batch of the training data, train nothing and write nothing but the page of
`--html FILE.html`.
"""

from __future__ import annotations

from types import SimpleNamespace

import typer
from rich.console import Console

from anybatch import Plan
from anybatch import check as check_gradients
from anybatch.cli.build import BatchNormPolicy, RunParts, build, describe, make_optimizer, seeded
from anybatch.cli.devices import absent_device, allocate, refuse_measured
from anybatch.cli.faults import SettingsError
from anybatch.cli.kernels import Explained
from anybatch.cli.options import settings_of
from anybatch.cli.outcome import ending
from anybatch.cli.planned import question_of, refuse_to_plan
from anybatch.cli.progress import Counted, Progress
from anybatch.cli.report.history import Envelope
from anybatch.cli.report.record import RunRecord
from anybatch.cli.report.write import page_of, refuse_page, write_page
from anybatch.cli.settings import Settings
from anybatch.cli.team import Team
from anybatch.cli.timeline import NONE, colored
from anybatch.cli.views import LoadedBatch, Reading
from anybatch.cli.wanted import Wanted
from anybatch.devices import planned_for
from anybatch.planning import forget_plans, ways_of

UNTIMED = "Nothing was trained, and no size was timed: --measure times those that fit."
TIMED = "Nothing was trained: steps in a few sizes were timed, and all was put back."
NOT_RUN = "Nothing was trained, and nothing was run: the device is not there."
NO_CHOICE = "Nothing was trained, and no size was timed: there is none to choose."


def plan(context: typer.Context, options: SimpleNamespace) -> None:
    """Print the plan that the options ask for, and write its page."""
    with ending(Team.here(), single="plan"):
        if options.forget:
            count = forget_plans()
            typer.echo(f"{count} program{'' if count == 1 else 's'} will be planned anew.")
            return
        _refuse_together(options)
        if options.html is not None:
            refuse_page(options.html)
        explained, wanted = Explained.of(options), Wanted.of(options)
        wanted.refuse(options.states)
        measure, target = options.measure or wanted.anything, absent_device(options.device)
        refuse_measured(target, measure=measure, workspace=explained.workspace is not None)
        with planned_for(target):
            budgeted = options.memory is not None and target is None
            allocated = allocate(context, options.malloc, options.device, budgeted=budgeted)
        settings = settings_of(options, workspace=explained.workspace)
        with seeded(options.seed, options.threads), planned_for(target):
            parts, batch = first_batch(settings)
            refuse_to_plan(settings, parts.device)
            stepped = make_optimizer(parts.recipe, parts.model.parameters())
            norms = BatchNormPolicy(settings, options.batch_size)
            question = question_of(settings, parts, stepped, norms, batch)
            with explained.context():
                found = question.answer(explained.share, options.states, timed=measure)
            step, config = question.engine_of(found).timeline(), describe(settings, parts)
            if measure:
                found = wanted.measured(question, found, settings, parts, stepped)
            rows = explained.rows(found, parts, batch)
        lines = [
            allocated,
            str(found),
            *wanted.lines(found, parts, context),
            _not_done(found, measured=measure, fixed=options.micro_batch is not None),
        ]
        console = Console(highlight=False)
        if options.json:
            typer.echo(found.to_json())
        else:
            Counted(console).say("\n".join(lines))
        explained.show(rows)
        if options.timeline:
            console.print(NONE if step is None else colored(step, console.width), markup=False)
        if options.html is not None:
            shown = None if step is None else Envelope.of(step)
            write_page(page_of(RunRecord("plan", config, plan=found, step=shown)), options.html)
            typer.echo(f"The plan is explained in {options.html}.", err=options.json)


def why(_: typer.Context, options: SimpleNamespace) -> None:
    """Print the ways to hold less than an undivided batch does, and the one of the plan."""
    with ending(Team.here(), single="why"):
        settings = settings_of(options)
        with seeded(options.seed, options.threads):
            parts, batch = first_batch(settings)
            refuse_to_plan(settings, parts.device)
            stepped = make_optimizer(parts.recipe, parts.model.parameters())
            norms = BatchNormPolicy(settings, options.batch_size)
            found = ways_of(question_of(settings, parts, stepped, norms, batch), options.states)
        typer.echo(str(found))


def check(_: typer.Context, options: SimpleNamespace) -> None:
    """Print whether the gradient in micro-batches is that of the full batch."""
    with ending(Team.here(), single="check"):
        settings = settings_of(options)
        with seeded(options.seed, options.threads):
            parts, batch = first_batch(settings)
            report = check_gradients(parts.model, parts.loss, (batch.inputs, batch.targets))
        typer.echo(str(report))
    if not report.exact:
        raise typer.Exit(1)


def _refuse_together(options: SimpleNamespace) -> None:
    """Refuse several ways to print a plan.

    Raises:
        SettingsError: naming the options that were given.
    """
    ways = ("timeline", "convolutions", "json")
    requested = [f"--{name}" for name in ways if getattr(options, name)]
    if len(requested) > 1:
        raise SettingsError(
            f"a plan is printed in one way at a time; {' and '.join(requested)} were given. Leave "
            f"{len(requested) - 1} of them out, or add --html FILE.html, a page."
        )


def _not_done(found: Plan, *, measured: bool, fixed: bool) -> str:
    """Return the sentence on measurements that a plan lacks, and how to request them."""
    if found.device is not None:
        return NOT_RUN
    sizes = found.memory.candidates if found.memory is not None else ()
    if any(size.seconds is not None for size in sizes):
        return TIMED
    return NO_CHOICE if measured or fixed else UNTIMED


def first_batch(settings: Settings) -> tuple[RunParts, LoadedBatch]:
    """Return the parts of a run, its model in training mode, and its first mini-batch."""
    parts = build(settings)
    reading = Reading(Progress(), skip_corrupt=settings.skip_corrupt)
    _, batch = next(reading.epoch(parts.loader(settings, shuffle=True), 1))
    parts.model.train()
    return parts, batch
