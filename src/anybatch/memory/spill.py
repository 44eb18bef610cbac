"""Choice of the store for offloaded tensors: host, file, or a file in a named folder.

auto    the nearest store, where a step needs one or is faster with it
host    page-locked memory, from a GPU      file    one without a name      off     none
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from anybatch.core import accelerator
from anybatch.core.absent import type_of
from anybatch.core.plan_sections import Link
from anybatch.errors import StoreError
from anybatch.memory import stores
from anybatch.memory.stores import SENT, FileStore, HostStore, StagedStore, Store, new_storage

WAYS = ("auto", "off", "host", "file")


@dataclass(frozen=True)
class Spill:
    """Choice of whether saved tensors are offloaded, and of their store.

    Attributes:
        way: "auto", "off", "host" or "file"; the last two always offload tensors.
        folder: of the file; None is the system's folder for temporary files.
    """

    way: str = "auto"
    folder: str | None = None

    def refuse_on(self, device: torch.device) -> None:
        """Refuse a store that a `device` does not support."""
        nearest = store_of(device)
        if self.way in ("host", "file") and self.way not in takes(device):
            raise ValueError(
                f'offload must be "{nearest}" on {type_of(device)}, where saved tensors go to '
                f'{WORDS[nearest]}, and it is "{self.way}": give "auto" or "{nearest}"'
            )
        if self.folder is not None and self.store(device) != "file":
            raise ValueError(
                f"spill names the folder of a file, and from {type_of(device)} saved tensors go to "
                f'{WORDS[nearest]}: leave spill out, or give offload="file"'
            )

    def store(self, device: torch.device) -> str:
        """Return "host" or "file": where the tensors of a `device` go."""
        return "file" if self.way == "file" else store_of(device)

    def where(self, device: torch.device) -> str:
        """Return the store of a `device`, or the folder of its file."""
        return self.folder or self.store(device)


WORDS = {"host": "page-locked memory of the host", "file": "a file"}


def spill_of(offload: Any, spill: str | PathLike[str] | None) -> Spill:
    """Return the choice from a user's arguments.

    Args:
        offload: as in `anybatch.plan`.
        spill: the same.

    Raises:
        ValueError: `offload` is none of the four, or `spill` is no folder that can be written to.
    """
    if offload not in WAYS:
        raise ValueError(f"offload must be one of {', '.join(WAYS)}, and it is {offload!r}")
    if spill is None:
        return Spill(offload)
    folder = Path(spill)
    fault = None
    if offload in ("off", "host"):
        fault = f'nothing goes to a file with offload="{offload}"'
    elif not folder.exists():
        fault = "it is not there"
    elif not folder.is_dir():
        fault = "it is no folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        fault = "it cannot be written to"
    if fault is not None:
        raise ValueError(
            f"spill must be a folder that can be written to, and of {str(folder)!r}: {fault}. "
            "Name another one, or leave spill out for the system's folder for temporary files"
        )
    return Spill(offload, str(folder))


def require_states(states: str | None, device: torch.device) -> None:
    """Require that an optimizer's state can be offloaded from its device as it was requested.

    Args:
        states: as in `anybatch.plan`.
        device: of the optimizer's parameters.

    Raises:
        ValueError: this store does not take tensors of the device.
    """
    every = (*takes(device), "auto")
    if states is not None and states not in every:
        raise ValueError(
            f"states must be {' or '.join(every)} on {type_of(device)}, and it is {states!r}"
        )


def store_of(device: torch.device) -> str:
    """Return the store nearest to a device, "host" or "file"."""
    return "file" if accelerator.of(type_of(device)).host else "host"


def takes(device: torch.device) -> tuple[str, ...]:
    """Return all of these where tensors of a device can go."""
    return ("file",) if accelerator.of(type_of(device)).host else ("host", "file")


def maker(
    destination: str | PathLike[str] | None,
    device: torch.device,
    *,
    check: bool = False,
    direct: bool = True,
) -> Callable[[], Store]:
    """Return a function that makes the store.

    Args:
        destination: "host", "file", a folder for the file, or None: that nearest to the device.
        device: that is left.
        check: compare checksums of returned tensors with those at offloading. Default False.
        direct: a file goes past the page cache, where the system can. Default True.

    Raises:
        ValueError: it means nothing on this device.
    """
    nearest = store_of(device)
    if destination in (None, "host") and nearest == "host":
        return partial(HostStore, check=check)
    if destination != "host":
        folder = None if destination in (None, "file") else Path(destination)
        if folder is None or folder.is_dir():
            make = FileStore if nearest == "file" else StagedStore
            return partial(make, folder, direct=direct, check=check)
    raise ValueError(
        'store must be "file" or a folder that is there, or "host" from a GPU, and it is '
        f"{str(destination)!r} on {type_of(device)}: leave it out for the store nearest to the "
        "device"
    )


def require_place(store: str, device: torch.device) -> None:
    """Require that saved tensors go where a plan says; it was made for a device, maybe another."""
    if store not in takes(device):
        raise ValueError(
            "a plan must be executed without changes, and by this one saved tensors go to "
            f"{WORDS[store]}, and from {device.type} they go to {WORDS[store_of(device)]}: plan "
            f"again, with the model on {device.type}"
        )


def clocked(destination: str | None, size: int, device: torch.device) -> Link:
    """Return the speeds of `size` bytes to a store, named as in `maker`, and back.

    It is the faster of two times.

    Raises:
        OSError: they cannot.
    """
    store, storage = maker(destination, device)(), new_storage(size, device)
    spent = [inf, inf]
    try:
        for key in range(2):
            for way, move in enumerate((store.writing, store.reading)):
                start = perf_counter()
                move(key, storage)()
                spent[way] = min(spent[way], perf_counter() - start)
    finally:
        store.close()
    return Link(out=size / spent[0], back=size / spent[1])


def file_folder(destination: str | None, device: torch.device) -> str | None:
    """Return the folder of the file to which tensors of a device go; None where it is the host.

    Args:
        destination: as in `maker`.
        device: that is left.

    Raises:
        StoreError: as in `stores.system_folder`.
    """
    destination = destination or store_of(device)
    if destination == "host":
        return None
    return str(stores.system_folder()) if destination == "file" else destination


def require_space(size: int, destination: str) -> None:
    """Require that `size` bytes can go to a store, "host", "file" or the folder of a file."""
    if destination == "host" or not size:
        return
    where = str(stores.system_folder()) if destination == "file" else destination
    try:
        left = shutil.disk_usage(where).free
    except OSError as error:
        raise StoreError(
            f"the folder of the spill file must be there, and {where} cannot be read ({error}): "
            "name another one (spill=)"
        ) from error
    otherwise = "name another folder (spill=), or give more memory="
    stores.require_space(size, left, of=SENT, folder=where, otherwise=otherwise)
