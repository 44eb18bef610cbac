"""The allocator is a stand-in: there is no GPU here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.segments import Allocator, allocator
from tests.unit.core.made_up import modules

from anybatch.memory.limits import SETTING, segments_of

__all__ = ["allocator", "modules"]
CUDA = torch.device("cuda")


def test_the_host_has_nothing_to_say() -> None:
    host = segments_of(torch.device("cpu"))
    assert host.in_words() == host.ask() == ""


def test_what_was_set_is_retained_next_to_it(allocator: Allocator) -> None:
    allocator.settings = "max_split_size_mb:512"
    found = segments_of(CUDA)
    assert "segments of fixed size" in found.in_words()
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in found.in_words()
    assert allocator.applied == []  # a plan changes nothing
    assert found.ask().startswith("CUDA segments: expandable")
    assert allocator.applied == ["max_split_size_mb:512,expandable_segments:True"]
    assert found.in_words().startswith("CUDA memory is in expandable segments")


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (Allocator(settings="expandable_segments:False"), "as was set"),
        (Allocator(settings=SETTING), "as was set"),
        (Allocator(reserved=1 << 20), "fixed (memory was taken before"),
        (Allocator(backend="cudaMallocAsync"), "none, the allocator is cudaMallocAsync"),
    ],
)
def test_where_it_was_chosen_already_or_is_too_late_it_is_left(
    allocator: Allocator, before: Allocator, message: str
) -> None:
    allocator.settings, allocator.backend = before.settings, before.backend
    allocator.reserved = before.reserved
    assert message in segments_of(CUDA).ask()
    assert allocator.applied == []


def test_another_allocator_has_no_segments_to_tell_of(allocator: Allocator) -> None:
    allocator.backend = "cudaMallocAsync"
    assert segments_of(CUDA).in_words() == ""


def test_where_torch_does_not_tell_the_environment_does(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", SETTING)
    assert segments_of(CUDA).ask() == f"CUDA segments: as was set ({SETTING})"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    segments_of(CUDA).ask()
    assert allocator.applied == [SETTING]


def test_an_xpu_has_no_segments(modules: dict[str, SimpleNamespace]) -> None:
    del modules
    segments = segments_of(torch.device("xpu"))
    assert (segments.ask(), segments.in_words()) == ("", "")
