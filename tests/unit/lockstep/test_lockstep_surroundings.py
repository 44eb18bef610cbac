from __future__ import annotations

from types import SimpleNamespace

import torch
from tests.unit.core.made_up import modules

from anybatch.lockstep.lockstep import Surroundings

__all__ = ["modules"]


def test_autocast_of_every_type_is_carried(modules: dict[str, SimpleNamespace]) -> None:
    modules["hpu"].is_initialized = lambda: False
    torch.set_autocast_enabled("xpu", True)
    try:
        now = {device_type: enabled for device_type, enabled, _ in Surroundings.now().autocast}
    finally:
        torch.set_autocast_enabled("xpu", False)
    assert now == {"cpu": False, "cuda": False, "xpu": True, "mps": False, "hpu": False}
    assert [one.type for one, _ in Surroundings.now().streams] == ["xpu"]
