from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.unit.core.made_up import half, modules, mps

from anybatch.core import accelerators
from anybatch.devices import RNGState
from anybatch.errors import NotYetError

__all__ = ["half", "modules"]


def test_a_step_is_refused_on_a_device_whose_generators_cannot_be_saved(
    modules: dict[str, SimpleNamespace],
) -> None:
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        modules["mps"] = mps()
        delattr(modules["mps"], name)
        verbs = "manual_seed_all" if name == "manual_seed" else name
        with pytest.raises(NotYetError, match=f"a device of type mps must have {verbs}, and"):
            accelerators.require_generators(torch.device("mps"))
    for name in ("cpu", "xpu"):
        accelerators.require_generators(torch.device(name))


def test_generators_of_all_devices_in_use_are_held(modules: dict[str, SimpleNamespace]) -> None:
    modules["hpu"].is_initialized = lambda: False
    before = RNGState.now()
    assert [name for name, _ in before.devices] == ["xpu:0", "xpu:1", "mps:0"]
    accelerators.seed(7)
    assert not before.same_as(RNGState.now())
    before.put_back()
    assert before.same_as(RNGState.now())


@pytest.mark.parametrize(
    ("config", "device"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl", "cuda"),
        ("cpu:xccl,xpu:xccl", "xpu"),
    ],
)
def test_collectives_carry_tensors_of_their_device(config: str, device: str) -> None:
    assert accelerators.carrier(config) == torch.device(device)


def test_autocast_has_every_type(modules: dict[str, SimpleNamespace]) -> None:
    modules["hpu"].is_initialized = lambda: False
    assert accelerators.autocast_types() == ("cpu", "cuda", "xpu", "mps", "hpu")


def test_a_seed_and_plans_of_the_host_do_not_care(half: tuple[str, str]) -> None:
    del half
    accelerators.seed(3)
    assert accelerators.with_plans()[0] == "cpu"
