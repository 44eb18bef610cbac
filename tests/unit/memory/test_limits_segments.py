"""The allocator is a stand-in: there is no GPU here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from anybatch.cli import devices
from anybatch.core.plan import Facts, decide
from anybatch.core.plan_sections import Memory
from anybatch.memory.limits import SETTING, segments_of

CUDA = torch.device("cuda")


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


def test_a_plan_within_a_budget_says_how_it_is() -> None:
    facts = Facts(4, True, "sum", False, False, (), False, 0, segments="CUDA memory is in pages")
    memory = Memory(1 << 30, "given", 1 << 20, (), 1, 1, "fakes")
    assert "because      CUDA memory is in pages" in str(decide(facts, memory))
    assert "pages" not in str(decide(facts))


def test_the_command_asks_and_says_so(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Context:
        obj = None

    monkeypatch.setattr(devices, "find_device", lambda _: CUDA)
    context: object = Context()
    reported = devices.allocate(context, "default", "cuda", budgeted=True)  # type: ignore[arg-type]
    assert reported.startswith("malloc: ")
    assert reported.endswith(
        "CUDA segments: expandable (offloaded and prefetched tensors leave no gaps)"
    )
    assert allocator.applied == [SETTING]
