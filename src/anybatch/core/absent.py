"""A device that a plan is made for and that is not in this machine.

A dry run needs no device: its tensors have no data. It is made on the host, and counted as the
other device would count: allocations rounded up, the memory of its driver and libraries, the host
as offload target. Quantities that only a run can measure are named, and not guessed.

    24GiB │ context │ 5 % │ budget │     budget: cuBLAS workspaces, rounded allocations of a step
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from anybatch.core.units import parse_bytes, parse_share, show_bytes

CUDA = "cuda"

CONTEXT = 600 * 1024**2
"""Bytes that a CUDA context is assumed to take, outside torch's allocator."""

WORKSPACE = 4096 * 8 * 1024
"""Bytes of a cuBLAS workspace on Hopper, the most that torch allocates by default."""

HANDLES = 2
"""Of cuBLAS, each with a workspace: that of forward, and that of the thread of backward."""

ASSUMED = HANDLES * WORKSPACE
"""Bytes of all workspaces of cuBLAS, where none was measured."""

SHARE = 0.95
"""Share of a device's free memory that is the default budget."""

NOT_MEASURED = (
    "time: no size was timed, so the micro-batch is the largest that fits",
    "the workspace that cuDNN takes for convolutions",
    "what the device's own kernels of attention, normalisation and recurrent layers save; those "
    "of the host were counted",
)
"""Quantities that a dry run cannot measure."""


@dataclass(frozen=True)
class AbsentDevice:
    """CUDA device that is absent: a memory size, and assumed overheads.

    Attributes:
        size: the bytes of its memory as they were written, such as "24GiB".
        nbytes: these.
        context: bytes that its driver is assumed to take.
        workspace: bytes that cuBLAS is assumed to take.
        not_measured: unknown quantities of the plan, a sentence each.
    """

    size: str
    nbytes: int
    context: int = CONTEXT
    workspace: int = ASSUMED
    not_measured: tuple[str, ...] = NOT_MEASURED

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> AbsentDevice:
        """Return the device from JSON.

        Args:
            found: the object in a plan's JSON.
        """
        return cls(**{**found, "not_measured": tuple(map(str, found["not_measured"]))})

    @property
    def left(self) -> int:
        """Bytes of the device left for a step and for the workspaces of libraries."""
        return max(0, self.nbytes - self.context)

    def budget(self, memory: float | str | None, share: float | None = None) -> tuple[int, str]:
        """Return the bytes that a step may hold, and their source in words.

        Args:
            memory: the argument; None is the free memory of the device, less a margin.
            share: of the free memory, where `memory` is None. Default None: all but the margin.

        Raises:
            ValueError: it is more than the free memory of the device.
        """
        share = share or parse_share(memory)
        if memory is None or share:
            part = "less 5 %" if share is None else f"{100 * share:g} % of it"
            source = f"{self.size} less {show_bytes(self.context)} for a context, {part}"
            return int((share or SHARE) * self.left), source
        requested = parse_bytes(memory)
        if requested > self.left:
            raise ValueError(
                f"memory must be at most what the device leaves, and of {self.size} a context is "
                f"assumed to take {show_bytes(self.context)}: got {memory!r}. Give "
                f'memory="{self.left // 1024**2}MiB" or less, or leave it out'
            )
        return requested, "as given"

    def lines(self) -> list[str]:
        """Return the lines of a plan about the device."""
        return [
            f"  device       planned for a CUDA device of {self.size} that is not there",
            f"    assumed        {show_bytes(self.context)} for its context, outside the budget",
            f"    assumed        {show_bytes(self.workspace)} of workspace for cuBLAS, inside it",
            *(f"    not measured   {one}" for one in self.not_measured),
        ]


def parse_device(text: str) -> AbsentDevice | None:
    """Return the device that a text such as "cuda:24GiB" describes; None where it names one.

    Args:
        text: the type of a device, a colon and the size of its memory; or the name of a device.

    Raises:
        ValueError: there is a size that means nothing, or that of another type of device.
    """
    device_type, colon, size = text.partition(":")
    if not colon or size.isdecimal():
        return None
    if device_type != CUDA:
        raise ValueError(
            "a device that is not there must be a CUDA device with the size of its memory, such "
            f'as "cuda:24GiB", and it is {text!r}: write it like that; for a device of another '
            "type name only the type, and give memory="
        )
    try:
        return AbsentDevice(size, parse_bytes(size, "device"))
    except (TypeError, ValueError):
        raise ValueError(
            f'the size of a device must be bytes such as in "cuda:24GiB", and it is {size!r} in '
            f"{text!r}: write it like that; a device of this machine has an index, as in cuda:0"
        ) from None


_PLANNED: ContextVar[AbsentDevice | None] = ContextVar("planned", default=None)


@contextmanager
def planned_for(device: AbsentDevice | None) -> Iterator[None]:
    """Count in the body as a device that is not there would.

    Args:
        device: as `parse_device` returns it; None changes nothing.
    """
    token = _PLANNED.set(device)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def absent() -> AbsentDevice | None:
    """Return the device that is planned for and not there; None where there is none."""
    return _PLANNED.get()


def type_of(device: Any) -> str:
    """Return the type of a `torch.device`, or that of the one which the host stands in for."""
    return str(device.type) if absent() is None else CUDA


def enough(nbytes: int) -> str:
    """Return the memory= or device= argument with which a step of `nbytes` fits, for errors."""
    device = absent()
    if device is None or nbytes <= device.left:
        return f'memory="{-(-nbytes // 1024)}KiB"'
    return f'device="cuda:{-(-(int(nbytes / SHARE) + 1 + device.context) // 1024**2)}MiB"'
