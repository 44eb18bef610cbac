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
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, astuple
from os import PathLike
from pathlib import Path
from shutil import get_terminal_size
from time import perf_counter
from typing import Any, Literal, TextIO

import torch

from anybatch.conv.chooser import Chooser, Chosen, Convolutions
from anybatch.conv.dispatch import inside, intercepted, retain
from anybatch.conv.divide import Key, keys_of
from anybatch.conv.measure import Costs
from anybatch.conv.problem import Problem
from anybatch.core.accelerators import with_plans
from anybatch.core.plan import Plan
from anybatch.core.plan_sections import Division, Divisions
from anybatch.core.units import parse_bytes
from anybatch.errors import NotYetError, StoreError

Policy = Literal["powerOfTwo", "all", "undivided"]
POLICIES = ("powerOfTwo", "all", "undivided")

Nan = Literal["spread", "local"]
NANS = ("spread", "local")

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
    nan: Nan = "spread",
) -> Iterator[Convolutions]:
    """Compute the convolutions of the process by the fastest algorithms, divided to fit.

    Enter and exit this context while no other thread computes convolutions: both change torch's
    dispatcher, which every thread reads.

    A convolution has three kernels: forward, the gradient of the input and that of the filters.
    The algorithm of each is chosen for each layer and each number of samples, by measuring at its
    first use. An `Engine` with a budget measures between its steps. Kernels that share a total are
    measured when a pass of the network is over. If no algorithm is clearly faster, torch's own
    kernel runs.

    Results are torch's up to rounding, which for products of spectra is in proportion to the
    *largest* values of an image and a filter: the rounding of these, in every place.

    - Values much smaller than the largest, such as 1e-9 beside 1, lose their digits, which torch's
      own kernel keeps where no large value is in the window.
    - Sums of integers, such as counts by a box of ones, need not be integers: round them.
    - One NaN or infinity, or a value so large that a spectrum overflows, such as 1e38 in float32,
      makes NaN of the image, or of the tile, where torch's own kernel makes it of the windows with
      this value. With `nan="local"` such calls are torch's.

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
        seconds: that measuring may take, for all kernels together: no measurement begins that is
            expected to end later. Kernels that are not measured by then are torch's; with 0 all
            that are not in the file. The first measurements of a process take longer,
            for torch loads modules in them. Default 300.
        progress: name the kernels that are being measured on the error stream, if that is a
            terminal or a notebook, and measuring takes long. Default True.
        nan: "local": both operands are looked through before a faster algorithm, and where one
            has a value that would spread, torch computes this call. Default "spread": they are not.

    Yields:
        The choices, kernel by kernel; they can be printed.

    Raises:
        ValueError: a workspace, `policy` or `nan` is not valid, or both workspaces are passed.
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
    if nan not in NANS:
        raise ValueError(f'nan must be "spread" or "local", and it is {nan!r}')
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
    chooser.found.nan = nan
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


def plan_file() -> Path | None:
    """Return the file of plans in the user's folder for caches; None for a user without one."""
    try:
        return _cache_folder() / "anybatch" / "plans.sqlite"
    except RuntimeError:  # no home
        return None


def _cache_folder() -> Path:
    """Return the folder in which the system's programs store caches."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


# Choice of an engine's convolutions: torch, a workspace of its own, or a plan's kernels.


def engaged(device: torch.device, workspace: Any, plan: Plan | None) -> Engaged:
    """Return the `Engaged` that computes an engine's convolutions.

    Args:
        device: where its model is.
        workspace: the argument; None is the context that the user has entered, or torch.
        plan: the plan that is obeyed, if there is one.

    Raises:
        ValueError: `workspace` means nothing.
        NotYetError: convolutions are always torch's on its device.
    """
    if plan is not None and plan.convolutions is not None:
        return Engaged(device.type, obeying(plan.convolutions))
    if workspace is None:
        return Engaged(device.type)
    workspace_bytes = parse_bytes(workspace, "workspace")
    if device.type not in kernel_devices():
        raise NotYetError(
            f"convolutions are divided on {' and '.join(kernel_devices())} here, and the model is "
            f"on {device}: leave workspace out"
        )
    return Engaged(device.type, chooser_of(workspace_bytes))


# Convolutions of an engine's steps: the chooser that computes them, and when it chooses.
#
# Within a budget nothing is measured inside a step. Kernels are chosen before it, for the sizes
# that its micro-batches will have; and those that only the step itself has shown, before the next
# one.
#
#    foresee ── recorded on fakes ──> chosen ──> step (what is new is torch's, and noted) ──> chosen


UNCHANGED = nullcontext()
"""The context in which torch computes convolutions."""


class Engaged:
    """Convolutions of an engine, with its own chooser or one that the user has entered.

    Args:
        device: type of device.
        own: the engine's own; None (default) is the one that the user has entered, if any.
    """

    def __init__(self, device: str, own: Chooser | None = None) -> None:
        self._device, self._own = device, own
        if own is not None:
            retain(device)

    @property
    def chooser(self) -> Chooser | None:
        """Return the active chooser; None where torch computes convolutions."""
        found = self._own or inside(self._device)
        return found if isinstance(found, Chooser) else None

    @property
    def yields(self) -> Chooser | None:
        """Return the engine's own chooser if its workspace may be reduced; else None."""
        own = self._own
        return own if own is not None and not own.found.shared and own.measures else None

    def step(self, *, waits: bool) -> AbstractContextManager[None]:
        """Compute the convolutions of a step in the body.

        Args:
            waits: it has a budget, so nothing is measured inside.
        """
        chooser = self.chooser
        return UNCHANGED if chooser is None else self._chosen(chooser, waits=waits)

    @contextmanager
    def _chosen(self, chooser: Chooser, *, waits: bool) -> Iterator[None]:
        chooser.choose()
        own = nullcontext() if self._own is None else intercepted(self._device, self._own)
        with own, chooser.waiting() if waits else nullcontext():
            yield

    @property
    def count(self) -> int:
        """How many kernels have been chosen so far."""
        chooser = self.chooser
        return 0 if chooser is None else len(chooser.found.chosen)

    def record(self, keys: Iterable[Key] | None = None) -> Divisions | None:
        """Return how kernels are divided; None where convolutions are torch's.

        Args:
            keys: which. Default None, or none: all that were chosen.
        """
        chooser = self.chooser
        if chooser is None or chooser.found.shared:
            return None
        every = chooser.found.chosen
        wanted = set(keys or ())
        chosen = {key: one for key, one in every.items() if not wanted or key in wanted}
        kernels = tuple(_division(key, one) for key, one in chosen.items())
        space = chooser.found.workspace
        requested = chooser.requested if chooser.requested > space else 0
        return Divisions(space, chooser.found.policy, chooser.used(chosen), kernels, requested)


def obeying(divisions: Divisions) -> Chooser:
    """Return a chooser that computes kernels as a plan specifies, and the others with torch."""
    found = Convolutions(divisions.workspace, divisions.policy)
    for key, one in zip(keys_of(divisions), divisions.kernels, strict=True):
        found.chosen[key] = Chosen((one.configuration,), one.seconds)
    return Chooser(found, None, 0.0)


def _division(key: Key, chosen: Chosen) -> Division:
    problem, size = key
    (configuration,) = chosen.configurations
    parts = tuple(astuple(part) for part in configuration.parts)
    return Division(tuple(asdict(problem).items()), size, parts, chosen.seconds)


# Message on a terminal about a measurement that takes long.
#
# The first pass of a network through `anybatch.convolutions` may take minutes without output. So
# after a while one line shows the current kernel and algorithm, and is erased when measuring is
# over. Without a terminal or a notebook there is no output.

PATIENCE = 2.0
"""Seconds of measuring after which something is said."""

PAUSE = 1.0
"""Seconds without a measurement after which a new wait begins."""


class Telling:
    """Progress line on a terminal: call it before each measurement.

    Args:
        on: say anything at all.
        stream: where. Default None: the error stream, of a terminal or a notebook.
    """

    def __init__(self, *, on: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._on = on and (self._stream.isatty() or "ipykernel" in sys.modules)
        self._begin = self._last = 0.0
        self._count = 0
        self._shown = False

    def __call__(self, problem: Problem, size: int, algorithm: str) -> None:
        """Record the next measurement, and show it if measuring takes long."""
        if not self._on:
            return
        now = perf_counter()
        if now - self._last > PAUSE:
            self._begin = now
        self._last, self._count = now, self._count + 1
        if now - self._begin > PATIENCE:
            self._show(f"measuring convolutions, {self._count}: {problem}, {algorithm}@{size}")

    def over(self) -> None:
        """Remove the line: nothing is measured for now."""
        if self._shown:
            self._stream.write("\r" + " " * _width() + "\r")
            self._stream.flush()
            self._shown = False

    def _show(self, text: str) -> None:
        self._shown = True
        width = _width()
        self._stream.write(f"\r{text[:width]:<{width}}")
        self._stream.flush()


def _width() -> int:
    """Return the letters of a line that do not make a terminal begin another one."""
    return get_terminal_size().columns - 1
