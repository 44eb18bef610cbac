"""One rank of a loop whose accelerator is a sleep: loading, computing, summing, updating.

Sleeps take no core, as an accelerator takes none; gradients are summed for real, by gloo.
"""

import fcntl
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WARM = 3
"""Steps that do not count."""


@dataclass(frozen=True)
class Job:
    """What a step does on every rank.

    Attributes:
        name: of the case.
        compute: seconds of the largest share of the mini-batch.
        serial: seconds of one reader that all ranks use in turn, for all of them.
        sharded: seconds of a rank's own reading.
        hidden: seconds of one reader that loads the next mini-batch meanwhile.
        update: seconds of the optimizer.
        gradients: bytes that are summed.
    """

    name: str
    compute: float
    serial: float = 0.0
    sharded: float = 0.0
    hidden: float = 0.0
    update: float = 0.0
    gradients: int = 0


def run(jobs: list[Job], gpus: int, steps: int) -> dict[str, list[float]]:
    """Return for each job the seconds of its steps, of rank 0: all wait for each other's sums."""
    with tempfile.TemporaryDirectory() as folder:
        encoded = json.dumps([asdict(job) for job in jobs])
        mp.spawn(_rank, args=(gpus, folder, encoded, steps), nprocs=gpus)  # type: ignore[attr-defined, no-untyped-call]
        found: dict[str, list[float]] = json.loads((Path(folder) / "answer.json").read_text())
    return found


def _rank(rank: int, gpus: int, folder: str, encoded: str, steps: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=gpus)
    try:
        with (Path(folder) / "reader").open("w") as reader:
            jobs = [Job(**one) for one in json.loads(encoded)]
            found = {job.name: _loop(job, gpus, steps, reader.fileno()) for job in jobs}
        if rank == 0:
            (Path(folder) / "answer.json").write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _loop(job: Job, gpus: int, steps: int, reader: int) -> list[float]:
    """Return the seconds of each step that counts."""
    gradients = torch.zeros(max(1, job.gradients // 4))
    found = []
    with ThreadPoolExecutor(1) as loader:
        dist.barrier()
        ahead = loader.submit(sleep, job.hidden)
        begin = perf_counter()
        for _ in range(steps + WARM):
            ahead.result()
            ahead = loader.submit(sleep, job.hidden)
            _step(job, gpus, gradients, reader)
            end = perf_counter()
            found.append(end - begin)
            begin = end
        ahead.result()
    return found[WARM:]


def _step(job: Job, gpus: int, gradients: torch.Tensor, reader: int) -> None:
    if job.serial:
        fcntl.flock(reader, fcntl.LOCK_EX)
        sleep(job.serial / gpus)
        fcntl.flock(reader, fcntl.LOCK_UN)
    if job.sharded:
        sleep(job.sharded)
    sleep(job.compute)
    if gpus > 1:
        dist.all_reduce(gradients)
    if job.update:
        sleep(job.update)
