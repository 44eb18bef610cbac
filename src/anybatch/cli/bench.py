"""`anybatch bench --convolutions`: measure a model's convolutions before a training.

Measurements are stored in a file that every later process reads, and that may be copied to other
machines like this one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import typer
from rich.console import Console

from anybatch.cli.build import seeded
from anybatch.cli.devices import allocate
from anybatch.cli.explain import first_batch
from anybatch.cli.faults import SettingsError
from anybatch.cli.kernels import console_of, refuse_without_rows, summary_of, table_of
from anybatch.cli.options import settings_of
from anybatch.cli.outcome import INTERRUPTED, ending
from anybatch.cli.profiled import moving
from anybatch.cli.team import Team
from anybatch.kernels import KernelBenchmark, record_kernels


def bench(context: typer.Context, options: SimpleNamespace) -> None:
    """Measure the convolutions of a model, and print their algorithms."""
    with ending(Team.here(), single="bench"):
        _refuse(options)
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
            benchmark = KernelBenchmark(
                options.workspace, policy=options.policy, cache=options.cache or True
            )
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                times = benchmark.measure(
                    keys, seconds=options.seconds, processes=options.processes
                )
                _watch(times, len(keys), f"and are kept in {benchmark.path}", errors)
                rows = benchmark.choose(recorder, keys)
        console.print(table_of(rows))
        console.print(summary_of(rows), highlight=False, soft_wrap=True)
        notes = [one.message for one in caught] or [f"Measurements are kept in {benchmark.path}"]
        console.print(f"{notes[0]}.", highlight=False, markup=False, soft_wrap=True)


def _watch(times: Iterator[tuple[object, int]], total: int, note: str, errors: Console) -> None:
    """Measure kernels, and move a bar."""
    done = 0
    try:
        with moving("measuring convolutions", total) as move:
            for done, (problem, _) in enumerate(times, 1):
                move(done, str(problem))
    except KeyboardInterrupt:
        text = f"interrupted: {done} of {total} kernels were measured, {note}"
        errors.print(text, highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None


def _refuse(options: SimpleNamespace) -> None:
    if not options.convolutions:
        raise SettingsError(
            "bench must be told what to measure; nothing was named. Add --convolutions."
        )
    if options.seconds <= 0 or options.processes < 1:
        raise SettingsError(
            "seconds must be above 0 and processes at least 1; got "
            f"{options.seconds:g} and {options.processes}."
        )
