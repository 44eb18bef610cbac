"""One training under its cap, in a process of its own: a job on standard input, its outcome out.

A process of its own, because the limit is the process's, because a refused allocation may end it,
and because the heap that one training leaves behind would be room for the next.
"""

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from anybatch.cli.build import build
from anybatch.cli.faults import TrainingError
from anybatch.cli.progress import Progress
from anybatch.cli.report.drawing import Line, Titled, draw_lines
from anybatch.cli.settings import Settings
from anybatch.cli.train import train
from benchmarks.mbs.tables.jobs import UNDIVIDED_WAYS, Job, Resolution
from benchmarks.mbs.tables.limited import STACK, Limit, is_memory_failure, make_limit
from benchmarks.mbs.tables.plain import Row, train_undivided
from benchmarks.mbs.training_rows import CURVES

TRAINED, FAILED, DIVERGED = "trained", "failed", "diverged"
Outcome = dict[str, Any]


class BeginsLimit(Progress):
    """A progress that shows nothing and begins the limit with the first epoch."""

    def __init__(self, limit: Limit) -> None:
        self.limit: Limit | None = limit

    def begin_epoch(self, epoch: int, epochs: int, micro_batches: int) -> None:
        """Begin the limit, once."""
        super().begin_epoch(epoch, epochs, micro_batches)
        if self.limit is not None:
            self.limit.begin()
            self.limit = None


def in_micro_batches(settings: Settings, limit: Limit) -> list[Row]:
    """Train as the command does; return the same rows as the baseline, from the run folder."""
    train(settings, BeginsLimit(limit))
    assert settings.out is not None
    text = (settings.out / "metrics.jsonl").read_text()
    lines = [line for line in map(json.loads, text.splitlines()) if line["kind"] == "epoch"]
    return [
        {name: line[name.replace("metric", line["metric"])] for name in CURVES}
        | {"seconds": line["seconds"]}
        for line in lines
    ]


def outcome(job: Job, settings: Settings) -> Outcome:
    """Train `job` under its cap; return how it ended, and its figures or the error's first line."""
    limit = make_limit(build(settings), job.batch, job.cap, job.lanes)
    if job.lanes:
        threading.stack_size(STACK)
    try:
        if job.way in UNDIVIDED_WAYS:
            rows = train_undivided(settings, limit.begin)
        else:
            rows = in_micro_batches(settings, limit)
    except TrainingError as error:
        return {"ended": DIVERGED, "error": first_line(error)}
    except Exception as error:
        if not is_memory_failure(error):
            raise
        limit.lift()  # to have room for the answer
        return {"ended": FAILED, "error": first_line(error)}
    finally:
        limit.lift()
    names = (*CURVES, "seconds")
    return {"ended": TRAINED, **{name: [round(row[name], 5) for row in rows] for name in names}}


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of what it says."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")


def job_of(record: dict[str, Any]) -> Job:
    """Return the job that `dataclasses.asdict` made `record` of, read back from JSON."""
    image, crop, pad = (record["look"][name] for name in ("image", "crop", "pad"))
    return Job(
        **{**record, "look": Resolution(None if image is None else (image[0], image[1]), crop, pad)}
    )


def warm_up() -> None:
    """Draw a picture, as a run does when it has ended: what that loads is no part of a training."""
    draw_lines(Titled("loss", "loss", "of no run"), [Line([1], [1.0])], "epoch")


def main() -> None:
    """Read {"job", "data", "crops", "out"}; write the outcome."""
    warm_up()
    request = json.load(sys.stdin)
    job = job_of(request["job"])
    settings = replace(
        job.settings(request["data"], request["crops"]), out=Path(request["out"]), overwrite=True
    )
    started = time.time()
    found = outcome(job, settings)
    json.dump({**found, "from": started, "to": time.time()}, sys.stdout)


if __name__ == "__main__":
    main()
