"""From the working file to the results file: what is finished of each table, and nothing else.

The results file is made from the working file alone, so it is the same whether a table was run in
one go or in ten, and a table of which a training is missing is not in it. The columns with
BatchNorm are the exception: they hold what there is of them, and can be added to a file whose
tables were run elsewhere.
"""

from typing import Any

from benchmarks.environment import environment
from benchmarks.mbs.tables.jobs import (
    BATCHES_OF_TABLE1,
    BATCHNORM,
    TABLES,
    Case,
    Job,
    Preset,
    of_table,
)
from benchmarks.mbs.tables.schedule import largest_undivided
from benchmarks.mbs.tables.working import Outcome, Working, busy_seconds

Results = dict[str, Any]


class NotRunError(Exception):
    """A training is not in the working file."""


def search_of(preset: Preset, case: Case, working: Working) -> tuple[int | None, list[Job]]:
    """Return the initial mini-batch of a case and the trainings that found it.

    (None, []) when they are not all there.
    """
    searched: list[Job] = []

    def outcome_of(job: Job) -> Outcome:
        searched.append(job)
        found = working.get(job)
        if found is None:
            raise NotRunError
        return found

    try:
        return largest_undivided(preset, case, outcome_of), searched
    except NotRunError:
        return None, []


def finished(preset: Preset, working: Working) -> tuple[dict[str, int], dict[str, list[Job]]]:
    """Return the initial mini-batches that were found, and the trainings of each complete table."""
    searches = {case.name: search_of(preset, case, working) for case in preset.cases}
    initial = {name: size for name, (size, _) in searches.items() if size is not None}
    jobs = {name: of_table(name, preset, initial) for name in TABLES}
    jobs["table2"] = [job for _, searched in searches.values() for job in searched]
    jobs[BATCHNORM] = [job for job in jobs[BATCHNORM] if working.get(job)]
    complete = {name: of for name, of in jobs.items() if of and all(working.get(job) for job in of)}
    return initial, complete


def collected(preset: Preset, working: Working, processes: int) -> Results:
    """Return the content of a results file."""
    initial, complete = finished(preset, working)
    jobs = dict.fromkeys(job for of in complete.values() for job in of)
    outcomes = {job: found for job in jobs if (found := working.get(job)) is not None}
    return {
        "environment": environment() | {"threads": 1, "malloc": _modes(preset)},
        "seeds": list(preset.seeds),
        "processes": processes,
        "table_seconds": {
            name: round(busy_seconds(outcomes[job] for job in of), 1)
            for name, of in complete.items()
            if name != BATCHNORM
        },
        "batches_of_table1": list(BATCHES_OF_TABLE1),
        "order": [case.name for case in preset.cases],
        "cases": {case.name: _case(case, initial.get(case.name)) for case in preset.cases},
        "sizes": {
            "training images": "all" if preset.samples is None else preset.samples,
            "epochs": preset.epochs,
            "bytes of the cap": {case.name: case.cap for case in preset.cases},
        },
        "runs": [_run(job, found) for job, found in outcomes.items()],
    }


def added(before: Results, jobs: list[Job], working: Working) -> Results:
    """Return a results file with those of `jobs` that are finished, all with BatchNorm, in it.

    Each takes the place of the same one with another number of epochs; everything else stays.
    """
    found = [_run(job, one) for job in jobs if (one := working.get(job)) is not None]
    names = ("case", "pixels", "batch", "micro", "way", "seed")
    new = {tuple(run[name] for name in names) for run in found}
    others = [run for run in before["runs"] if tuple(run[name] for name in names) not in new]
    return before | {"runs": others + found}


def _modes(preset: Preset) -> str:
    return ", ".join(f"{case.malloc} for {case.name}" for case in preset.cases)


def _case(case: Case, initial: int | None) -> Results:
    resolutions = {"small": case.small, "large": case.large}
    pixels = {
        size: resolution.pixels
        for size, resolution in resolutions.items()
        if resolution is not None
    }
    found = {"paper": case.paper, "task": case.task, "model": case.model, "recipe": case.recipe}
    return found | {"lr": case.lr, "cap": case.cap, "initial": initial, "pixels": pixels}


def _run(job: Job, found: Outcome) -> Results:
    figures = {name: value for name, value in found.items() if name not in ("from", "to")}
    of = {"case": job.case, "pixels": job.look.pixels, "batch": job.batch, "micro": job.micro}
    seconds = round(found["to"] - found["from"], 1)
    return of | {"way": job.way, "seed": job.seed, "whole_seconds": seconds} | figures
