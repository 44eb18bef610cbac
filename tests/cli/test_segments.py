from __future__ import annotations

import pytest
import torch
from tests.segments import Allocator, allocator

from anybatch.cli import devices

__all__ = ["allocator"]


def test_the_command_asks_and_says_so(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Context:
        obj = None

    monkeypatch.setattr(devices, "find_device", lambda _: torch.device("cuda"))
    context: object = Context()
    reported = devices.allocate(context, "default", "cuda", budgeted=True)  # type: ignore[arg-type]
    assert reported.startswith("malloc: ")
    assert reported.endswith(
        "CUDA segments: expandable (offloaded and prefetched tensors leave no gaps)"
    )
    assert allocator.applied == ["expandable_segments:True"]
