"""A file without a name, where the system has all there is and where it has less."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from random import Random

import pytest

import anybatch.memory.stores as ours
from anybatch.memory.stores import left_for, nameless, read_at, write_at

LESS = {
    "all": (),
    "no O_DIRECT": ("O_DIRECT",),
    "no pwrite": ("pwrite", "preadv"),
    "nothing": ("O_DIRECT", "pwrite", "preadv"),
}


@pytest.mark.parametrize("less", LESS)
def test_bytes_are_read_back_from_their_places(
    less: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in LESS[less]:
        monkeypatch.delattr(os, name)
    file, past = nameless(tmp_path, direct="O_DIRECT" in LESS[less])
    assert not past
    assert list(tmp_path.iterdir()) == []
    rng, places = Random(0), [(7, 1), (0, 5), (100, 4000), (8, 3)]
    written = {at: rng.randbytes(size) for at, size in places}
    for at, data in written.items():
        assert write_at(file, memoryview(data), at) == len(data)
    for at, data in reversed(written.items()):
        out = memoryview(bytearray(len(data)))
        assert read_at(file, out, at) == len(data)
        assert bytes(out) == data
    assert read_at(file, memoryview(bytearray(10)), 4100 - 3) == 3
    os.close(file)


def test_a_folder_has_the_space_of_the_files_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda of: found.append(of) or real(of))
    file, _ = nameless(tmp_path, direct=False)
    assert left_for(file, tmp_path) > 0
    monkeypatch.setattr(ours, "BY_FILE", False)
    assert left_for(file, tmp_path) > 0
    assert left_for(file, None) > 0
    assert found == [file, tmp_path, Path(tempfile.gettempdir())]
    os.close(file)


def test_where_an_open_file_keeps_its_name_the_system_is_set_to_delete_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "O_TEMPORARY", os.O_CLOEXEC, raising=False)
    flags_passed = []
    real = os.open

    def noted(path: str, flags: int, mode: int = 0o777, **rest: int) -> int:
        flags_passed.append(flags)
        return real(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", noted)
    file, past = nameless(tmp_path, direct=True)
    assert (flags_passed[-1], past) == (os.O_RDWR | os.O_CLOEXEC, False)
    assert len(list(tmp_path.iterdir())) == 1  # Linux does not delete it
    os.close(file)
