"""Which device a run is on: the one that was named, if torch can use it here."""

from __future__ import annotations

import torch

from anybatch.accelerators import default_device
from anybatch.apps.faults import SettingsError


def find_device(name: str | None) -> torch.device:
    """Return the device called `name`; None is CUDA where there is one, else the CPU.

    Raises:
        SettingsError: when there is no such device here.
    """
    if name is None:
        return default_device()
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingsError(
            f"device must be one that torch can use here; got {name!r} ({_first_line(error)}). "
            "Leave --device out to have it chosen."
        ) from error
    return device


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
