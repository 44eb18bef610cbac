from __future__ import annotations

from types import SimpleNamespace

import torch
from tests.unit.core.made_up import modules

from anybatch.lockstep.scheduler import LaneTurns

__all__ = ["modules"]


def test_lanes_have_generators_of_their_own_there(modules: dict[str, SimpleNamespace]) -> None:
    modules["hpu"].is_initialized = lambda: False
    state = torch.get_rng_state()
    turns = LaneTurns(2)
    turns.begin(0)
    modules["xpu"].set_rng_state(torch.tensor([99], dtype=torch.uint8), "xpu:1")
    turns.pass_token(0, [])
    turns.begin(1)
    other = modules["xpu"].get_rng_state("xpu:1")
    assert int(other) != 99
    assert torch.equal(modules["mps"].get_rng_state("mps"), other)  # seeded alike
    turns.pass_token(1, [])
    turns.finish()
    assert int(modules["xpu"].get_rng_state("xpu:1")) == 99
    torch.set_rng_state(state)
