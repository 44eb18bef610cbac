"""`anybatch.convolutions`: every convolution by its fastest algorithms, within a workspace.

torch runs a convolution in one piece, by what its libraries have for it. For large and long windows
they have no fast algorithm on a CPU, and where they have one it may need more workspace than there
is. Here every kernel is measured once, in several sizes and by several algorithms, and then divided
so that the fastest of them fit.

    kernel ──> known? ──> fft@4 x 8           for large windows, in as much workspace as was given
                    └──> torch's own kernel   where nothing is faster

Source: Oyama, Ben-Nun, Hoefler and Matsuoka, u-cuDNN (2018).
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Literal

from anybatch.conv.chooser import Chooser, Convolutions
from anybatch.conv.costs import Costs
from anybatch.conv.intercept import intercepted
from anybatch.conv.telling import Telling
from anybatch.core.accelerators import with_plans
from anybatch.core.units import parse_bytes
from anybatch.errors import StoreError

Policy = Literal["powerOfTwo", "all", "undivided"]
POLICIES = ("powerOfTwo", "all", "undivided")

Cache = str | PathLike[str] | bool

WORKSPACE = "64MiB"
"""Of a kernel where nobody has said, as of a layer in Caffe2."""

SECONDS = 300.0
"""For measuring, of all kernels together."""


@contextmanager
def convolutions(
    workspace: int | str | None = None,
    *,
    workspace_total: int | str | None = None,
    policy: Policy = "powerOfTwo",
    cache: Cache = True,
    seconds: float = SECONDS,
    progress: bool = True,
) -> Iterator[Convolutions]:
    """Compute the convolutions of the process by the fastest algorithms, divided to fit.

    Enter and leave it where no other thread computes convolutions outside: torch's dispatcher is
    changed then, which every thread reads.

    Forward, the gradient of the input and that of the filters are three kernels, chosen for each
    layer and each number of samples by measuring, when they are met for the first time; in an
    `Engine` that has a budget, between its steps; those that share a total, when a pass of the
    network is over. Results are torch's up to rounding. Where nothing
    is clearly faster, torch's own kernel runs.

    Args:
        workspace: bytes, or a text such as "64MiB", that one kernel may allocate beside its
            operands and its result. Default None: 64 MiB.
        workspace_total: what all kernels of a network may have together, divided so that the
            network is fastest. It is given instead of `workspace`. The first pass is torch's: what
            the network has is found out by it. Default None.
        policy: which micro-batches are measured: powers of two (default), "all", or only the whole
            mini-batch ("undivided").
        cache: keep what was measured in a file, for other processes: True (default) is
            "convolutions.sqlite" in the user's cache folder, if that can be written; or name one.
            False forgets it with the context.
        seconds: that measuring may go on for, of all kernels together; what is left out then is
            torch's. Default 300.
        progress: say what is measured on the error stream, if that is a terminal or a notebook,
            and it takes long. Default True.

    Yields:
        What was chosen, kernel by kernel; it prints itself.

    Raises:
        ValueError: a workspace or `policy` means nothing, or both workspaces are given.
        StoreError: the file that was named cannot be written.

    Example:
        >>> with anybatch.convolutions(workspace="100MiB"):
        ...     loss_fn(model(x), y).backward()

    Source: u-cuDNN, sections III-A to III-C (WR and WD).
    """
    if workspace is not None and workspace_total is not None:
        raise ValueError(
            "workspace is for each kernel and workspace_total for all of them, and both were "
            "given: leave one out"
        )
    shared = workspace_total is not None
    name = "workspace_total" if shared else "workspace"
    workspace_bytes = parse_bytes(workspace_total or workspace or WORKSPACE, name)
    chooser = chooser_of(
        workspace_bytes,
        policy=policy,
        cache=cache,
        seconds=seconds,
        progress=progress,
        shared=shared,
    )
    with ExitStack() as stack:
        for device in devices():
            stack.enter_context(intercepted(device, chooser))
        yield chooser.found


def chooser_of(
    workspace: int,
    *,
    policy: str = "powerOfTwo",
    cache: Cache = True,
    seconds: float = SECONDS,
    progress: bool = True,
    shared: bool = False,
) -> Chooser:
    """Return the chooser that computes kernels; arguments are those of `convolutions`.

    Raises:
        ValueError: `policy` means nothing.
        StoreError: the file that was named cannot be written.
    """
    if policy not in POLICIES:
        raise ValueError(f'policy must be "powerOfTwo", "all" or "undivided", and it is {policy!r}')
    found, tell = Convolutions(workspace, policy, shared), Telling(on=progress)
    try:
        costs = Costs(cache_file(cache), seconds=seconds, tell=tell)
    except StoreError as error:
        if cache is not True:
            raise
        warnings.warn(f"{error}. It is forgotten with this process now", stacklevel=3)
        costs = Costs(seconds=seconds, tell=tell)
    return Chooser(found, costs, seconds)


def devices() -> list[str]:
    """Return the device types on which this library computes convolutions."""
    return with_plans()


def cache_file(cache: Cache) -> Path | None:
    """Return the file of measurements; None if they are not stored."""
    if cache is False:
        return None
    if cache is not True:
        return Path(cache)
    return _cache_folder() / "anybatch" / "convolutions.sqlite"


def _cache_folder() -> Path:
    """Return the folder in which the system's programs store caches."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
