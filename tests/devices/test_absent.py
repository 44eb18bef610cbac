"""A plan for a device that is not there is the plan that is made on the device."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import anybatch
from anybatch.devices import AbsentDevice, planned_for
from anybatch.reports import Memory
from anybatch.tools.autocast import autocast_of_absent

N = 48
ELSEWHERE = 4096
"""Bytes of blocks that a step on the device has beside the forecast of its tensors."""


class Words(nn.Module):
    """Scores of all words for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score = nn.Embedding(500, 64), nn.Linear(64, 500)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.score(self.embed(x))
        return scores.transpose(1, 2)


class Reader(nn.Module):
    """A transformer over words."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embed, self.last = nn.Embedding(500, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.inner(self.embed(x)).mean(1))
        return found


class CastsInside(nn.Module):
    """Forward switches on autocast."""

    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Linear(64, 256), nn.LayerNorm(256), nn.Softmax(-1), nn.Linear(256, 5)]
        self.inner = nn.Sequential(*wide)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            x = self.inner[:2](x)
        with torch.autocast(x.device.type):
            found: Tensor = self.inner[2:](x)
        return found.float()


def images(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Two convolutions, normalised."""
    first = [nn.Conv2d(3, 16, 3, padding=1), norm(16), nn.ReLU(), nn.MaxPool2d(2)]
    more = [nn.Conv2d(16, 32, 3, padding=1), norm(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*first, *more, nn.Flatten(), nn.Linear(32, 5))


def dense() -> nn.Module:
    """Linear layers."""
    first = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh()]
    return nn.Sequential(*first, nn.Linear(256, 5))


WORDS = torch.randint(500, (N, 24))
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "dense": (dense, torch.randn(N, 64)),
    "GroupNorm": (lambda: images(lambda c: nn.GroupNorm(4, c)), torch.randn(N, 3, 16, 16)),
    "BatchNorm": (lambda: images(nn.BatchNorm2d), torch.randn(N, 3, 16, 16)),
    "transformer": (Reader, WORDS),
    "words": (Words, WORDS),
    "inside": (CastsInside, torch.randn(N, 64)),
}


def around(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """A person's autocast."""
    return nullcontext() if dtype is None else torch.autocast("cuda", dtype)


def own(found: Memory | None) -> tuple[int, int, int]:
    """The predicted bytes, floor and whole, but for workspaces of libraries."""
    assert found is not None
    extra = sum(n for name, n in found.owners if name in ("cuBLAS", "workspace", "other tensors"))
    return found.predicted - extra, found.floor - extra, found.undivided - extra


@pytest.mark.large(few=3)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_it_counts_what_the_device_counts(
    stand_in: Any, name: str, dtype: torch.dtype | None
) -> None:
    make, x = MODELS[name]
    model, y = make(), WORDS if name == "words" else torch.randint(5, (N,))
    with around(dtype), sdpa_kernel(SDPBackend.MATH):  # the device's own is not measured
        absent = anybatch.plan(model, F.cross_entropy, (x, y), device="cuda:4GiB")
        stand_in.clear_workspaces()
        there = anybatch.plan(model.cuda(), F.cross_entropy, (x, y), memory="3GiB", timed=False)
    assert absent.micro_batch == there.micro_batch
    for counted, observed in zip(own(absent.memory), own(there.memory), strict=True):
        assert abs(counted - observed) <= ELSEWHERE


@contextmanager
def lists_of_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Calls that torch's own tests of autocast make; of a package that they want, only a class."""
    package: Any = ModuleType("expecttest")
    package.TestCase = unittest.TestCase
    monkeypatch.setitem(sys.modules, "expecttest", package)
    from torch.testing._internal.autocast_test_lists import AutocastTestLists

    yield AutocastTestLists


def dtypes(lists: Any) -> dict[tuple[str, int, str], Any]:
    """The dtype of each call, or the name of its error."""
    found = dict[tuple[str, int, str], Any]()
    for name_of_list, calls in sorted(vars(lists).items()):
        for place, (name, args, *rest) in enumerate(calls if isinstance(calls, list) else []):
            functions = [getattr(one, name, None) for one in (torch, F, torch._C._nn, Tensor)]
            call = next((one for one in functions if one is not None), None)
            named = rest[0] if rest and isinstance(rest[0], dict) else {}
            if call is None or "cudnn" in name or name == "gru_cell":  # a kernel that is not there
                continue
            try:
                result = call(*args, **named)
            except (RuntimeError, TypeError) as error:
                result = type(error).__name__
            found[name_of_list, place, name] = getattr(result, "dtype", str(type(result)))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_operator_is_cast_as_there(
    stand_in: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    del stand_in
    with lists_of_torch(monkeypatch) as lists, FakeTensorMode(), around(dtype):
        want = dtypes(lists(torch.device("cuda:0")))
        with planned_for(AbsentDevice("1GiB", 1 << 30)), autocast_of_absent():
            assert dtypes(lists(torch.device("cpu"))) == want
    assert len(want) > 100
    assert {torch.float32, dtype} <= set(want.values())
