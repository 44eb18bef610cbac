"""Files of offloaded tensors are on a disk: in a file system that is memory they free none."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from anybatch.memory import stores

TABLE = """\
/dev/vda / ext4 rw 0 0
tmpfs {memory} tmpfs rw 0 0
/dev/vdb {memory}/disk ext4 rw 0 0
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose file system is memory, as far as the system says."""
    folder = tmp_path / "with space"
    (folder / "disk").mkdir(parents=True)
    (folder / "more").mkdir()
    table = tmp_path / "mounts"
    table.write_text(TABLE.format(memory=str(folder).replace(" ", "\\040")))
    monkeypatch.setattr(stores, "MOUNTS", table)
    return folder


def test_the_innermost_file_system_counts(memory: Path) -> None:
    assert stores.in_memory(memory)
    assert stores.in_memory(memory / "more")
    assert not stores.in_memory(memory / "disk")
    assert not stores.in_memory(memory.parent)


def test_another_mount_in_the_same_place_covers_the_first(memory: Path) -> None:
    with stores.MOUNTS.open("a") as table:
        table.write(f"/dev/vdc {str(memory).replace(' ', chr(92) + '040')} ext4 rw 0 0\n")
    assert not stores.in_memory(memory)


def test_a_system_that_lists_no_mounts_is_believed(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MOUNTS", memory / "nothing")
    assert not stores.in_memory(memory)


def test_the_systems_folder_gives_way_to_one_on_a_disk(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(memory))
    monkeypatch.setattr(stores, "ON_DISK", memory / "disk")
    assert stores.system_folder() == memory / "disk"
    descriptor, _ = stores.nameless(None, direct=False)
    stores.os.close(descriptor)
    monkeypatch.setattr(stores, "ON_DISK", memory / "more")
    with pytest.raises(stores.StoreError, match="must be on a disk, and .* is memory itself"):
        stores.system_folder()
