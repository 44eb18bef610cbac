"""Where state goes that has left its device: memory of the host, or a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path

import torch

from anybatch.stores import FileStore, HostStore, Store


def maker(given: str | PathLike[str] | None, device: torch.device) -> Callable[[], Store]:
    """Return what makes the store.

    Args:
        given: "host", "file", a folder for the file, or None: "host" from a GPU, "file" on the CPU.
        device: that is left.

    Raises:
        ValueError: it means nothing on this device.
    """
    host = device.type != "cpu"
    if given is None:
        given = "host" if host else "file"
    if given == "host" and host:
        return HostStore
    if given != "host" and not host:
        folder = None if given == "file" else Path(given)
        if folder is None or folder.is_dir():
            return partial(FileStore, folder, direct=True)
    raise ValueError(
        'store must be "host" from a GPU, and "file" or a folder that is there on the CPU, and it '
        f"is {str(given)!r} on {device.type}: leave it out to have what the device takes"
    )
