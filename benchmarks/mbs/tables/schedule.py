"""Run jobs in child processes, two at a time, each one once; and find the initial mini-batch.

A process pool keeps its processes; a training under a cap needs a new one each time, so threads
wait for children here. What is in the working file already is not run again.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.mbs.tables.data import Prepared
from benchmarks.mbs.tables.jobs import MALLOC, Case, Job, Preset, undivided
from benchmarks.mbs.tables.limited import says_no_memory
from benchmarks.mbs.tables.one_run import FAILED, TRAINED
from benchmarks.mbs.tables.working import Working
from benchmarks.results import console

ROOT = Path(__file__).parents[3]
ON_CPU = {
    "OMP_NUM_THREADS": "1",
    # oneDNN compiles each shape anew, keeps 1,024 kernels and reserves 256 KiB for each: a model of
    # many convolutions would fill its cap with reservations, a smaller last batch more of them.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512",
}
STOPPED = (signal.SIGINT, signal.SIGTERM)
Outcome = dict[str, Any]
Child = Callable[[Job, Prepared, Path], Outcome]


def child(job: Job, data: Prepared, out: Path) -> Outcome:
    """Train `job` in a new process and return its outcome.

    A process that the limit has killed is a failure too: libraries below torch do not all ask
    whether they were given the memory.

    Raises:
        RuntimeError: when it ended for another reason than memory, or was stopped.
    """
    ours = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    chosen = ON_CPU | MALLOC[job.malloc] if job.device == "cpu" else {}
    request = {"job": asdict(job), "data": str(data.folder), "crops": data.crops, "out": str(out)}
    started = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mbs.tables.one_run"],
        input=json.dumps(request),
        env={**ours, **chosen},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        found: Outcome = json.loads(done.stdout)
        return found
    return ended_badly(job, done.returncode, done.stderr) | {"from": started, "to": time.time()}


def ended_badly(job: Job, code: int, said: str) -> Outcome:
    """Return the outcome of a process that ended with `code`, having written `said`.

    Raises:
        RuntimeError: when that was no refusal of memory.
    """
    name = signal.Signals(-code).name if code < 0 else None
    if name is not None and -code not in STOPPED:
        return {"ended": FAILED, "error": f"the process ended with {name}"}
    lines = [line for line in said.splitlines() if line[:1] != " " and says_no_memory(line)]
    if name is None and lines:
        return {"ended": FAILED, "error": lines[-1]}
    raise RuntimeError(f"{job} must train or run out of memory; got {name or code}:\n{said}")


class Runs:
    """Runs jobs, `processes` at a time, and keeps what they gave."""

    def __init__(
        self,
        working: Working,
        data: Mapping[str, Prepared],
        folder: Path,
        processes: int,
        start: Child = child,
    ) -> None:
        self.working, self.data, self.folder, self.start = working, data, folder, start
        self.processes = processes

    def one(self, job: Job) -> Outcome:
        """Return the outcome of a job, from the working file or by running it."""
        found = self.working.get(job)
        if found is None:
            found = self.start(job, self.data[job.case], self.folder / name(job))
            self.working.add(job, found)
            console.print(f"{job}: {said(found)}", highlight=False, markup=False, soft_wrap=True)
        return found

    def all(self, jobs: Iterable[Job]) -> None:
        """Run what is not finished yet."""
        left = [job for job in dict.fromkeys(jobs) if self.working.get(job) is None]
        self.each(lambda job: self.one(job) and None, left)

    def missing(self, jobs: Iterable[Job]) -> int:
        """Return how many of the jobs are not finished."""
        return sum(self.working.get(job) is None for job in set(jobs))

    def each(self, do: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Return `do` of each, several at a time; after an error nothing more is begun."""
        with ThreadPoolExecutor(self.processes) as pool:
            futures = [pool.submit(do, item) for item in items]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def largest_undivided(preset: Preset, case: Case, one: Callable[[Job], Outcome]) -> int | None:
    """Return the largest power of two that trains undivided under the cap; None if not even 1.

    Doubling or halving from the case's guess, by whole trainings with the first seed: the same
    that tables 4 and 5 need.
    """

    def trains(batch: int) -> bool:
        job = undivided(preset, case, batch, preset.seeds[0])
        return bool(one(job)["ended"] != FAILED)

    batch = case.initial
    if trains(batch):
        while 2 * batch <= preset.largest and trains(2 * batch):
            batch *= 2
        return batch
    while batch > 1:
        batch //= 2
        if trains(batch):
            return batch
    return None


def name(job: Job) -> str:
    """Return the name of a job's run folder."""
    words = f"{job.model} {job.look.pixels} {job.way} {job.batch}"
    return "-".join(f"{words} {job.micro} {job.seed}".replace(":", " ").replace(",", " ").split())


def said(outcome: Outcome) -> str:
    """Return an outcome as half a line."""
    if outcome["ended"] != TRAINED:
        return f"{outcome['ended']}: {outcome['error']}"
    best = 100 * max(outcome["test_metric"])
    return f"best {best:.1f} %, {median(outcome['seconds']):.1f} s an epoch"
