"""Modules of accelerators, made up after those of torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anybatch.core import accelerator

MIB = 1 << 20


class Generators:
    """The generators of a made-up module, a number each."""

    def __init__(self, count: int) -> None:
        self.now = [torch.tensor([i], dtype=torch.uint8) for i in range(count)]

    def get_rng_state(self, device: Any) -> Tensor:
        return self.now[torch.device(device).index or 0].clone()

    def set_rng_state(self, state: Tensor, device: Any) -> None:
        self.now[torch.device(device).index or 0] = state.clone()

    def get_rng_state_all(self) -> list[Tensor]:
        return [state.clone() for state in self.now]

    def manual_seed(self, seed: int) -> None:
        self.now = [torch.tensor([seed % 251], dtype=torch.uint8) for _ in self.now]


class Stream(SimpleNamespace):
    """A stream that does everything at once."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def xpu(*, has_fp64: bool = True, tells: bool = True) -> SimpleNamespace:
    """``torch.xpu``, as far as it is asked."""
    draws = Generators(2)

    def mem_get_info(_device: torch.device) -> tuple[int, int]:
        if not tells:
            raise RuntimeError(
                "The device (Arc) doesn't support querying the available free memory"
            )
        return 96 * MIB, 128 * MIB

    return SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        Stream=lambda device: Stream(device=device),
        Event=SimpleNamespace,
        stream=lambda stream: stream,
        current_stream=lambda device=None: Stream(device=device),
        synchronize=lambda device: None,
        memory_allocated=lambda device: 3 * MIB,
        memory_reserved=lambda device: 7 * MIB,
        max_memory_allocated=lambda device: 5 * MIB,
        reset_peak_memory_stats=lambda device: None,
        mem_get_info=mem_get_info,
        get_device_properties=lambda device: SimpleNamespace(
            has_fp64=has_fp64, total_memory=128 * MIB
        ),
        get_device_name=lambda device=None: "Arc",
        get_rng_state=draws.get_rng_state,
        set_rng_state=draws.set_rng_state,
        get_rng_state_all=draws.get_rng_state_all,
        manual_seed_all=draws.manual_seed,
    )


def mps() -> SimpleNamespace:
    """``torch.mps``: one device, no stream, no peak, and functions that take no device."""
    draws = Generators(1)
    return SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        Event=SimpleNamespace,
        synchronize=lambda: None,
        current_allocated_memory=lambda: 3 * MIB,
        driver_allocated_memory=lambda: 7 * MIB,
        recommended_max_memory=lambda: 100 * MIB,
        get_rng_state=draws.get_rng_state,
        set_rng_state=draws.set_rng_state,
        manual_seed=draws.manual_seed,
    )


def hpu() -> SimpleNamespace:
    """A type that nobody has heard of, whose module says little."""
    return SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 2
    )


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, SimpleNamespace]:
    found = {"xpu": xpu(), "mps": mps(), "hpu": hpu()}
    real = torch.get_device_module
    made = cache(accelerator._of.__wrapped__)  # what was tried of torch's own is not known of these
    monkeypatch.setattr(accelerator, "_of", made)

    def module(device_type: Any) -> Any:
        return found[str(device_type)] if str(device_type) in found else real(device_type)

    monkeypatch.setattr(torch, "get_device_module", module)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *_: torch.device("hpu"), raising=True
    )
    for name in accelerator.GENERIC.values():
        monkeypatch.delattr(torch.accelerator, name)
    return found


MADE = {"xpu": xpu, "mps": mps, "hpu": xpu}
"""Modules with all that is asked of their type; the type that nobody knows has what XPU has."""


def fails(*_args: object, **_named: object) -> Any:
    raise RuntimeError("PyTorch is not linked with support for such devices")


def broken() -> Iterator[tuple[str, str, bool]]:
    """Each function of each module, once missing and once failing, and the module itself."""
    for device_type, make in MADE.items():
        yield device_type, "", False
        for name in vars(make()):
            yield from ((device_type, name, missing) for missing in (True, False))


@pytest.fixture(params=list(broken()), ids=lambda one: "-".join(map(str, one)))
def half(
    request: pytest.FixtureRequest,
    modules: dict[str, SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[str, str]:
    """A type of device whose module lacks a function, or has one that fails; or that has none."""
    device_type, name, missing = request.param
    modules.update((each, make()) for each, make in MADE.items())
    if not name:
        modules.pop(device_type)
        monkeypatch.setattr(torch, "get_device_module", partial(_module, modules))
    elif missing:
        delattr(modules[device_type], name)
    else:
        setattr(modules[device_type], name, fails)
    return device_type, name


def _module(modules: dict[str, SimpleNamespace], device_type: Any) -> Any:
    if str(device_type) not in modules:
        raise RuntimeError(
            f"Device '{device_type}' does not have a corresponding module registered"
        )
    return modules[str(device_type)]
