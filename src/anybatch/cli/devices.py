"""Device of a run, if torch can use it here, and the memory settings of it and of the host.

A GPU's memory is requested in expandable segments (`anybatch.devices.segments_of`). glibc's
handling of freed memory is fixed when a process begins (`allocator`): the command starts itself
again for it, and a program or a test that calls it is left as it is.
"""

from __future__ import annotations

import os

import torch
import typer

from anybatch.cli import allocator
from anybatch.cli.faults import SettingsError, as_setting
from anybatch.cli.process import ENTRY
from anybatch.devices import (
    AbsentDevice,
    absent,
    default_device,
    parse_device,
    segments_of,
    usable_device,
)


def find_device(name: str | None) -> torch.device:
    """Return the device called `name`; None is CUDA where there is one, else the CPU.

    Where a run is planned for a device that is not there, it is the host.

    Raises:
        SettingsError: when there is no such device here.
    """
    if absent() is not None:
        return torch.device("cpu")
    if absent_device(name) is not None:
        raise SettingsError(
            f"device must be one that torch can use here; got {name}, the size of one that is not "
            "there. Only anybatch plan accepts that."
        )
    if name is None:
        return default_device()
    try:
        return usable_device(name)
    except ValueError as error:
        raise SettingsError(
            f"device must be one that torch can use here; got {name!r} ({error}). "
            "Leave --device out to have it chosen."
        ) from error


def absent_device(name: str | None) -> AbsentDevice | None:
    """Return the device that `name` describes by its size, such as "cuda:24GiB"; else None.

    Raises:
        SettingsError: the size means nothing, or is that of another type of device.
    """
    with as_setting():
        return None if name is None else parse_device(name)


def refuse_measured(device: AbsentDevice | None, *, measure: bool, workspace: bool) -> None:
    """Refuse measurements on a device that is absent.

    Raises:
        SettingsError: naming it.
    """
    named = {"measure or a goal": measure, "workspace or convolutions": workspace}
    found = [name for name, requested in named.items() if requested]
    if device is not None and found:
        raise SettingsError(
            f"{' and '.join(found)} must be measured on the device; a CUDA device of {device.size} "
            "is not there. Leave them out."
        )


def allocate(
    context: typer.Context, malloc: allocator.RequestedMode, device: str | None, *, budgeted: bool
) -> str:
    """Return the memory settings in words; in the command's own process, apply them first."""
    found = find_device(device)
    decision = allocator.decide(malloc, found.type, budgeted=budgeted, environment=os.environ)
    host = str(decision)
    if decision.environment is not None:
        if context.obj is ENTRY:
            allocator.restart(decision.environment)
        now = allocator.running(os.environ)
        host = f"malloc: {now} (another mode is only for a process that the command begins)"
    return "; ".join(filter(None, (host, segments_of(found).ask())))
