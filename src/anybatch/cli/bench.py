"""`anybatch bench --convolutions`: measure a model's convolutions before anybody waits.

Measurements are stored in a file that every later process reads, and that may be copied to other
machines like this one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from anybatch.cli.build import seeded
from anybatch.cli.explain import first_batch
from anybatch.cli.faults import SettingsError
from anybatch.cli.kernels import console_of, refuse_without_rows, summary_of, table_of
from anybatch.cli.options import WORKSPACE, settings_of, takes
from anybatch.cli.outcome import INTERRUPTED, ending
from anybatch.cli.process import allocate
from anybatch.cli.team import Team
from anybatch.kernels import KernelBenchmark, record_kernels


@takes(
    "convolutions data task model batch_size micro_batch workspace policy cache seconds "
    "processes recipe loss norm image_size crop seed threads device malloc skip_corrupt",
    convolutions=(bool, "Measure the convolutions of a model."),
    workspace=(*WORKSPACE, KernelBenchmark.WORKSPACE),
)
def bench(context: typer.Context, options: SimpleNamespace) -> None:
    """Measure a model's convolutions on this machine, and store the times for later processes.

    With --convolutions: every convolution of the model on --micro-batch samples, forward and
    backward, by all algorithms that --workspace allows. Ctrl-C keeps the measurements so far.
    """
    team = Team.here()
    with ending(team):
        team.refuse("bench")
        _refuse(
            convolutions=options.convolutions, seconds=options.seconds, processes=options.processes
        )
        console, errors = console_of(), Console(stderr=True)
        allocated = allocate(context, options.malloc, options.device, budgeted=False)
        errors.print(allocated, highlight=False, soft_wrap=True)
        settings = settings_of(options, micro_batch=options.micro_batch or options.batch_size)
        with seeded(options.seed, options.threads):
            parts, batch = first_batch(settings)
            refuse_without_rows(batch.inputs)
            recorder = record_kernels(parts.model, batch.inputs)
            keys = recorder.scaled(
                min(options.micro_batch or options.batch_size, options.batch_size)
            )
            space = options.workspace or KernelBenchmark.WORKSPACE
            benchmark = KernelBenchmark(space, policy=options.policy, cache=options.cache or True)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                times = benchmark.measure(
                    keys, seconds=options.seconds, processes=options.processes
                )
                _watch(times, len(keys), f"and are kept in {benchmark.path}", errors)
                rows = benchmark.choose(recorder, keys)
        console.print(table_of(rows))
        console.print(summary_of(rows), highlight=False, soft_wrap=True)
        note = f"Measurements are kept in {benchmark.path}"
        notes = [str(one.message) for one in caught] or [note]
        console.print(f"{notes[0]}.", highlight=False, markup=False, soft_wrap=True)


def _watch(times: Iterator[tuple[object, int]], total: int, note: str, errors: Console) -> None:
    """Measure kernels, and move a bar."""
    columns = (
        TextColumn("measuring convolutions"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
    )
    done = 0
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=total, last="")
        try:
            for done, (problem, _) in enumerate(times, 1):
                bar.update(task, completed=done, last=str(problem))
        except KeyboardInterrupt:
            bar.stop()
            text = f"interrupted: {done} of {total} kernels were measured, {note}"
            errors.print(text, highlight=False, markup=False, soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from None


def _refuse(*, convolutions: bool, seconds: float, processes: int) -> None:
    if not convolutions:
        raise SettingsError(
            "bench must be told what to measure; nothing was named. Add --convolutions."
        )
    if seconds <= 0 or processes < 1:
        raise SettingsError(
            f"seconds must be above 0 and processes at least 1; got {seconds:g} and {processes}."
        )
