from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.unit.core.made_up import modules

from anybatch.memory.spill import (
    FileStore,
    HostStore,
    Spill,
    StagedStore,
    maker,
    require_place,
    takes,
)

__all__ = ["modules"]


def test_a_way_has_its_store_on_each_device(tmp_path: Path) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    folder = str(tmp_path)
    assert type(maker(None, cuda)()) is HostStore
    assert type(maker(folder, cuda)()) is StagedStore
    assert Spill("file", folder).where(cuda) == folder
    assert [Spill(way).store(cuda) for way in ("auto", "host", "file")] == ["host", "host", "file"]
    Spill("file", folder).refuse_on(cuda)
    with pytest.raises(ValueError, match='leave spill out, or give offload="file"'):
        Spill("auto", folder).refuse_on(cuda)
    with pytest.raises(ValueError, match='offload must be "file" on cpu'):
        Spill("host").refuse_on(cpu)


def test_a_device_has_what_is_nearest_and_what_was_requested(tmp_path: Path) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    folder = str(tmp_path)
    found = {
        (device.type, options): type(maker(options, device, direct=False)())
        for device in (cuda, cpu)
        for options in (None, "file", folder)
    }
    assert found == {
        ("cuda", None): HostStore,
        ("cuda", "file"): StagedStore,
        ("cuda", folder): StagedStore,
        ("cpu", None): FileStore,
        ("cpu", "file"): FileStore,
        ("cpu", folder): FileStore,
    }


@pytest.mark.parametrize("store", ["host", "file"])
def test_a_gpu_sends_to_either_place(store: str) -> None:
    require_place(store, torch.device("cuda"))


@pytest.mark.parametrize("device_type", ["xpu", "mps", "hpu"])
def test_memory_of_a_device_is_staged(
    modules: dict[str, SimpleNamespace], device_type: str, tmp_path: Path
) -> None:
    del modules
    device = torch.device(device_type)
    assert type(maker(None, device)()) is HostStore
    assert type(maker(tmp_path, device)()) is StagedStore
    assert takes(device) == ("host", "file")
