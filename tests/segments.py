"""A stand-in for the allocator of a GPU, where there is none."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch


@dataclass
class Allocator:
    """What torch's allocator would answer."""

    settings: str = ""
    backend: str = "native"
    reserved: int = 0
    applied: list[str] = field(default_factory=list)

    def set(self, settings: str) -> None:
        self.applied.append(settings)
        self.settings = settings


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    fake = Allocator()
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: fake.backend)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: fake.reserved)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", fake.set)
    monkeypatch.setattr(
        torch._C, "_accelerator_getAllocatorSettings", lambda: fake.settings, raising=False
    )
    return fake
