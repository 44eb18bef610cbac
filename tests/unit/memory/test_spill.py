from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anybatch.memory.spill import HostStore, Spill, StagedStore, maker


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
