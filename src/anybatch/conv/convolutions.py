"""`anybatch.convolutions`: every convolution by its fastest algorithms, within a workspace.

torch runs a convolution in one piece, by an algorithm of its libraries. For large and long windows
they have no fast one on a CPU, and a fast one may need more workspace than is available. Here every
kernel is measured once, in several sizes and by several algorithms, and then divided so that the
fastest of them fit.

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
"""Default of a kernel, as of a layer in Caffe2."""

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

    Enter and exit this context while no other thread computes convolutions: both change torch's
    dispatcher, which every thread reads.

    A convolution has three kernels: forward, the gradient of the input and that of the filters.
    The algorithm of each is chosen for each layer and each number of samples, by measuring at its
    first use. An `Engine` with a budget measures between its steps. Kernels that share a total are
    measured when a pass of the network is over. Results are torch's up to rounding. If no
    algorithm is clearly faster, torch's own kernel runs.

    Args:
        workspace: bytes, or a text such as "64MiB", that one kernel may allocate in addition to its
            operands and its result. Default None: 64 MiB.
        workspace_total: bytes that all kernels of a network may have together, divided so that the
            network is fastest. It replaces `workspace`. torch computes the first pass, which shows
            the kernels of the network. Default None.
        policy: which micro-batches are measured: powers of two (default), "all", or only the
            undivided mini-batch ("undivided").
        cache: store measurements in a file, for other processes. True (default):
            "convolutions.sqlite" in the user's cache folder, if that can be written. A path: that
            file. False: measurements are dropped at the end of the context.
        seconds: the most that measuring may take, for all kernels together; kernels that are not
            measured by then are torch's. Default 300.
        progress: name the kernels that are being measured on the error stream, if that is a
            terminal or a notebook, and measuring takes long. Default True.

    Yields:
        The choices, kernel by kernel; they can be printed.

    Raises:
        ValueError: a workspace or `policy` is not valid, or both workspaces are passed.
        StoreError: the file that `cache` names cannot be written.

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
        for device in kernel_devices():
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
        warnings.warn(
            f"{error}. The measurements are not stored and end with this process", stacklevel=3
        )
        costs = Costs(seconds=seconds, tell=tell)
    return Chooser(found, costs, seconds)


def kernel_devices() -> list[str]:
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
