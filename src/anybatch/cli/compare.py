"""`--compare`: the same training with and without anybatch, under the same limit of memory.

That anybatch trains where a plain loop cannot is easily said. Here both are run, one after the
other, each in a process of its own (`limited`): same weights, same data in the same order, same
optimizer, same limit. One fails or fits, the other too, and both lines are printed.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from anybatch.cli.build import build, seeded
from anybatch.cli.faults import SettingsError, TrainingError
from anybatch.cli.limited import READY, Ended, allowance
from anybatch.cli.settings import Settings
from anybatch.devices import MemoryLimit
from anybatch.units import parse_bytes, parse_share, show_bytes

PLAIN, OURS = "plain loop", "anybatch"


def compare(settings: Settings, steps: int) -> Group:
    """Train both ways for `steps` steps, at most the run's own; return the results, to print.

    Raises:
        AnybatchError: when there is nothing to compare, or one of the two could not be run.
    """
    settings = dataclasses.replace(settings, out=None).checked()
    if settings.memory is None or parse_share(settings.memory):
        raise SettingsError(
            "compare needs a limit in bytes to hold both trainings to; --memory was "
            f"{settings.memory or 'not given'}. Name it, such as --memory 64MiB."
        )
    if steps < 1:
        raise SettingsError(f"compare-steps must be at least 1; got {steps}.")
    with seeded(settings.seed, settings.threads):
        device = build(settings).device  # what does not fit together is said once, before both
    if not MemoryLimit.possible(device):
        raise SettingsError(
            f"compare needs a device whose memory the system can limit: cuda, or cpu on Linux; got "
            f"{device} on {sys.platform}. Leave --compare out."
        )
    budget = parse_bytes(settings.memory)
    rows = {
        name: train_in_subprocess(settings, steps, plain=name == PLAIN) for name in (PLAIN, OURS)
    }
    errors = [Text(f"{name}: {ended.error}") for name, ended in rows.items() if ended.error]
    return Group(table(rows, settings.batch_size, budget), *errors)


def train_in_subprocess(settings: Settings, steps: int, *, plain: bool) -> Ended:
    """Train in a process of its own; one that the system ends has failed.

    Raises:
        TrainingError: when it did not come as far as its first step.
    """
    order = {"settings": dataclasses.asdict(settings), "steps": steps, "plain": plain}
    done = subprocess.run(
        [sys.executable, "-m", "anybatch.cli.limited", json.dumps(order)],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout.splitlines()
    if done.returncode == 0:
        return Ended(**json.loads(said[-1]))
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    code = done.returncode
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    reason = ": ".join([how, *last])
    if READY not in said:
        name = PLAIN if plain else OURS
        raise TrainingError(
            f"compare must run both trainings; that of the {name} did not begin ({reason}). Train "
            "without --compare to see why."
        )
    return Ended(error=reason)


def table(rows: Mapping[str, Ended], batch: int, budget: int) -> Table:
    """Return the two trainings as a table."""
    found = Table(
        title=f"batch {batch} under {show_bytes(budget)}",
        caption=(
            f"The system enforces the limit, and for both it is {show_bytes(budget)} more than is "
            f"held when model, data and plan are ready, and {show_bytes(allowance(budget))} for "
            "memory outside of tensors. Peak: live tensors in the first step, or up to its "
            "failure. Seconds: the median of the others, on mini-batches of full size."
        ),
    )
    for name in ("training", "outcome", "seconds a step", "peak", "process growth", "last loss"):
        found.add_column(name)
    for name, ended in rows.items():
        fits = f"fits, {ended.steps} steps"
        found.add_row(
            name,
            f"fails in step {ended.steps + 1}" if ended.error else fits,
            "-" if ended.seconds is None else f"{ended.seconds:.3g}",
            "-" if ended.peak is None else show_bytes(ended.peak),
            "-" if ended.growth is None else show_bytes(ended.growth),
            "-" if ended.loss is None else f"{ended.loss:.4f}",
        )
    return found
