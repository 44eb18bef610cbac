"""Saved tensors and stores as a test needs them: small ones leave, copies are slow, disks fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from anybatch.core.plan_sections import Link
from anybatch.memory.stores import FileStore
from anybatch.offloading import recorder, saved_tensors


def small_leave(patch: pytest.MonkeyPatch | None = None) -> None:
    """Have saved tensors of 64 bytes be offloaded; without a patch, for good in this process."""
    (patch or pytest.MonkeyPatch()).setattr(saved_tensors, "SMALL", 64)


def link_of(out: float, back: float) -> Link:
    """Return a way to the host and from it, in bytes a second."""
    return Link(out, back)


def slow_link(
    patch: pytest.MonkeyPatch | None = None, speed: float = 1e3, back: float | None = None
) -> None:
    """Have plans think that copies are slow, so that they compute again what they can.

    Or, at a `speed` of many bytes a second, fast: on a machine that is busy real ones are slow.
    """
    link = Link(speed, speed if back is None else back)
    (patch or pytest.MonkeyPatch()).setattr(recorder, "Link", lambda out, back: link)


def file_store(folder: Path | None = None) -> FileStore:
    """Return a store in a file."""
    return FileStore(folder)


def file_method(name: str) -> Any:
    """Return a method of the stores in files."""
    return getattr(FileStore, name)


def instead(patch: pytest.MonkeyPatch, name: str, method: Any) -> Any:
    """Have the stores in files use another method, and return their own."""
    real = file_method(name)
    patch.setattr(FileStore, name, method)
    return real
