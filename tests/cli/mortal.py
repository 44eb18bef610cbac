"""Runs that are killed for real: `kill -9`, at a micro-batch or before a change of a file.

A process that answers lines on its standard input: each is a run to train or to resume, in a child
of its own that kills itself where it is told to. So torch is imported once for hundreds of deaths.

    in   {"resume": false, "settings": {...}, "at": ["file", 7]}
         {"words": ["train", ...], "limit": 9000, "errors": "path"}    the command, under a limit
    out  -9          killed, or the exit code
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

from anybatch.__main__ import main as anybatch
from anybatch.cli.progress import Progress
from anybatch.cli.settings import Settings
from anybatch.cli.train import resume, train
from anybatch.errors import AnybatchError

SLOW = ("matplotlib.figure", "matplotlib.backends.backend_agg", "torch.utils.tensorboard")
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class Mortal(Progress):
    """Dies at the `at`-th micro-batch."""

    def __init__(self, at: int) -> None:
        self.left = at

    def micro_batch(self, samples: int) -> None:
        self.left -= 1
        if self.left == 0:
            die()


def die_before_change(folder: str, at: int) -> None:
    """Die before the `at`-th time that a file in `folder` is opened, renamed or removed."""
    left = at

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in EVENTS and str(arguments[0]).startswith(folder):
            left -= 1
            if left == 0:
                die()

    sys.addaudithook(audit)


def command(words: list[str], limit: int, errors: str) -> None:
    """Be the command, which may write no file of more than `limit` bytes."""
    with Path(os.devnull).open("w") as sys.stdout, Path(errors).open("w") as sys.stderr:
        sys.argv[1:] = words
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        anybatch()


def live(line: str) -> None:
    """Do what a line says; it may be the end."""
    order = json.loads(line)
    if "words" in order:
        command(**order)
        return
    settings = {**order["settings"], "out": Path(order["settings"]["out"])}
    event_type, at = order["at"] or ("", 0)
    if event_type == "file":
        die_before_change(str(settings["out"]), at)
    shown = Mortal(at if event_type == "micro-batch" else 0)
    if order["resume"]:
        resume(settings["out"], progress=shown)
    else:
        train(Settings(**settings), shown)


def main() -> None:
    torch.set_num_threads(1)
    for name in SLOW:
        importlib.import_module(name)
    train(Settings(model="cnn:2", epochs=1, batch_size=1000, micro_batch=999, threads=1))
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 2
            try:
                live(line)
                code = 0
            except AnybatchError:
                code = 1
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
