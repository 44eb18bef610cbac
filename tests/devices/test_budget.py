"""The device has no more memory than the budget: no allocation fails, and the forecast is close."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from benchmarks.guide.values.networks import WAYS, Values, batch
from benchmarks.mbs.cases import CASES, Case
from tests.oracle import assert_exact, error_of, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import anybatch
from anybatch import Engine

N = 96
ABOVE = 1.02
"""A forecast is at most so many times what a step holds."""
SMALL = 8192
"""Bytes of small blocks, masks and scalars of 512 each, that it may be more in any case."""

ABOVE_IN_LANES = 1.2
"""The same of lanes, for which whole storages leave: room that is smaller than one stays empty."""


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.LSTM(16, 64, batch_first=True), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x)[0][:, -1])


def images(norm: Any) -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), norm(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    more = [norm(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 5)]
    return nn.Sequential(*layers, *more)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(8 * 32, 5))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 5)), (64,)),
    "images, GroupNorm": (lambda: images(lambda c: nn.GroupNorm(2, c)), (3, 32, 32)),
    "images, BatchNorm": (lambda: images(nn.BatchNorm2d), (3, 32, 32)),
    "lstm": (Recurrent, (12, 16)),
    "transformer": (transformer, (8, 32)),
}


@pytest.mark.large(few=3)
@pytest.mark.parametrize("share", [0.3, 0.6])
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_step_is_what_was_foreseen(
    stand_in: Any, name: str, where: str, share: float
) -> None:
    gc.collect()  # what other tests have left would be counted, and be gone
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().double().cuda()
    x, y = torch.randn(N, *shape).double(), torch.randint(5, (N,))
    there = x.cuda(), y.cuda()
    want = undivided(model, F.cross_entropy, *there)
    order = torch.randperm(N)
    noise = error_of(undivided(model, F.cross_entropy, there[0][order], there[1][order]), want)
    batch, state = there if where == "device" else (x, y), copy.deepcopy(model.state_dict())
    stand_in.clear_workspaces()
    found = anybatch.plan(model, F.cross_entropy, batch, memory="4GiB", timed=False).memory
    assert found is not None
    budget = int(found.floor + share * (found.undivided - found.floor))
    plan = anybatch.plan(model, F.cross_entropy, batch, memory=budget, timed=False)
    engine = Engine(model, F.cross_entropy, plan=plan)
    stand_in.cap(budget)
    failures = stand_in.statistics()["failures"]
    peaks = []
    for _ in range(3):
        model.load_state_dict(state)
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss = engine.backward(*batch)
        peaks.append(torch.cuda.max_memory_reserved())
    stand_in.cap(1 << 40)
    assert stand_in.statistics()["failures"] == failures
    assert plan.memory is not None
    assert max(peaks) <= plan.memory.predicted
    if "BatchNorm" not in name:  # waiting micro-batches may hold less than they have room for
        assert plan.memory.predicted <= ABOVE * max(peaks)
    assert_exact(state_of(model, loss), want, noise)


LOSSES = [pytest.param(case, id=case.name) for case in CASES if case.make(0).declared is None]


@pytest.mark.large(of="capped losses", few=3)
@pytest.mark.parametrize("case", LOSSES)
def test_no_allocation_fails_over_the_catalogue(stand_in: Any, case: Case) -> None:
    problem = case.make(0)
    model, loss = problem.model.cuda(), problem.loss_fn
    if isinstance(loss, nn.Module):
        loss.cuda()
    x, y = (tree_map_only(Tensor, Tensor.cuda, t) for t in (problem.inputs, problem.targets))
    undivided(model, loss, x, y)
    stand_in.clear_workspaces()
    found = anybatch.plan(model, loss, (x, y), memory="4GiB", timed=False).memory
    assert found is not None
    budget = (found.floor + found.undivided) // 2
    plan = anybatch.plan(model, loss, (x, y), memory=budget, timed=False)
    engine = Engine(model, loss, plan=plan)
    stand_in.cap(budget)
    failures = stand_in.statistics()["failures"]
    for _ in range(2):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        engine.backward(x, y)
        assert plan.memory is not None
        assert torch.cuda.max_memory_reserved() <= plan.memory.predicted
    stand_in.cap(1 << 40)
    assert stand_in.statistics()["failures"] == failures


def small() -> nn.Module:
    """Two convolutions with BatchNorm, whose inputs are as large as what a lane of them holds."""
    first = [nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2)]
    more = [nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()]
    return nn.Sequential(*first, *more, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5))


class Words(nn.Module):
    """Scores of many words at each of some places."""

    def __init__(self, put: Any = lambda scores: scores.transpose(1, 2), words: int = 2000) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(words, 64), nn.Linear(64, words)
        self.put = put

    def forward(self, x: Tensor) -> Any:
        """[n, T] -> [n, V, T], or as they are `put`."""
        return self.put(self.last(self.table(x)))


class Boxes(nn.Module):
    """Two maps of an image, and its mean colours, which no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Conv2d(3, c, 3, padding=1) for c in (32, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.one(x), self.other(x), x.mean((2, 3))


def by_word(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=3)


def by_count(scores: Tensor, targets: Tensor) -> Tensor:
    """Return a mean over some words, of how many only all samples tell."""
    each, some = F.cross_entropy(scores.transpose(1, 2), targets, reduction="none"), targets > 50
    return (each * some).sum() / some.sum()


def of_boxes(outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
    return F.l1_loss(outputs[0], targets[0]) + F.l1_loss(outputs[1], targets[1])


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    z = F.normalize(outputs, dim=1)
    return F.cross_entropy(z @ z.T / 0.1, targets)


def words(n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(2000, (n, 16)), torch.randint(2000, (n, 16))


def maps(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 32, 32), torch.randint(21, (n, 32, 32))


def boxes(n: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    return torch.randn(n, 3, 32, 32), (torch.randn(n, 32, 32, 32), torch.randn(n, 8, 32, 32))


def numbers(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 16), torch.arange(n)


def layers(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, width))


OUTPUTS: dict[str, tuple[Any, Any, Any]] = {
    "words, [n, V, T]": (Words, F.cross_entropy, words),
    "words, [n, T, V]": (lambda: Words(lambda scores: scores), by_word, words),
    "words in a mapping": (
        lambda: Words(lambda scores: {"scores": scores}),
        lambda outputs, targets: by_word(outputs["scores"], targets),
        words,
    ),
    "words with a count": (lambda: Words(lambda scores: scores), by_count, words),
    "words, smoothed": (Words, nn.CrossEntropyLoss(label_smoothing=0.1), words),
    "a map": (lambda: nn.Conv2d(3, 21, 3, padding=1), F.cross_entropy, maps),
    "boxes": (Boxes, of_boxes, boxes),
    "numbers": (lambda: layers(4000), F.cross_entropy, numbers),
    "contrast": (lambda: layers(2000), contrast, numbers),
}
"""Models with outputs that are larger than all else, a loss, and rows of n samples."""


def held(
    stand_in: Any, model: nn.Module, batch: Any, loss: Any = F.cross_entropy, **requested: Any
) -> tuple[int, int]:
    """Return the bytes that a first step holds, and those that were foreseen.

    A function of its own: what an expected failure keeps of its frames would count in later tests.
    """
    stand_in.workspace(0)
    plan = anybatch.plan(model, loss, batch, timed=False, **requested)
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    Engine(model, loss, plan=plan).backward(*batch)
    assert plan.memory is not None
    return torch.cuda.max_memory_allocated(), plan.memory.predicted


def held_with_large_outputs(stand_in: Any, name: str, n: int) -> tuple[int, int]:
    torch.manual_seed(0)
    make, loss, rows = OUTPUTS[name]
    return held(stand_in, make().cuda(), rows(8), loss, memory="8GiB", micro_batch=n)


def refused(stand_in: Any, below: int) -> str:
    """Return the error of a step whose budget and device have fewer bytes than the floor."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(512, 5)).cuda()
    batch = torch.randn(4096, 512), torch.randint(5, (4096,))
    stand_in.clear_workspaces()
    found = anybatch.plan(model, F.cross_entropy, batch, memory="4GiB", timed=False).memory
    assert found is not None
    stand_in.clear_workspaces()
    stand_in.cap(found.floor - below)
    try:
        Engine(model, F.cross_entropy, memory=found.floor - below).backward(*batch)
    except (anybatch.errors.BudgetError, torch.OutOfMemoryError) as error:
        return type(error).__name__
    return ""


def wide() -> nn.Module:
    """A layer whose rows are most of what a lane of it holds, and whose weight is more."""
    first = [nn.Flatten(), nn.Linear(1200, 16), nn.BatchNorm1d(16), nn.Tanh()]
    return nn.Sequential(*first, nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))


@pytest.mark.large(few=4)
@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("make", [small, wide])
def test_lanes_of_a_tight_budget_hold_no_more_than_was_foreseen(
    stand_in: Any, make: Any, where: str, half: bool, share: float
) -> None:
    torch.manual_seed(0)
    model, x, y = make().cuda(), torch.randn(48, 3, 20, 20), torch.randint(5, (48,))
    batch = (x.cuda(), y.cuda()) if where == "device" else (x, y)
    stand_in.workspace(0)  # two are counted, and lanes have one
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        found = anybatch.plan(model, F.cross_entropy, batch, memory="4GiB", timed=False).memory
        assert found is not None
        budget = int(1.5 * found.floor + share * (found.undivided - found.floor))
        plan = anybatch.plan(model, F.cross_entropy, batch, memory=budget, timed=False)
        engine, peaks = Engine(model, F.cross_entropy, plan=plan), []
        for _ in range(3):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            engine.backward(*batch)
            peaks.append(torch.cuda.max_memory_allocated())
    assert plan.memory is not None
    assert max(peaks) <= plan.memory.predicted <= budget
    assert half or plan.memory.predicted <= ABOVE_IN_LANES * max(peaks)


@pytest.mark.parametrize("below", [1 << 20, 5 << 20])
def test_planning_below_the_floor_ends_in_a_budget_error(stand_in: Any, below: int) -> None:
    assert refused(stand_in, below) == "BudgetError"


@pytest.mark.product
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_first_step_with_large_outputs_holds_what_was_foreseen(
    stand_in: Any, name: str, n: int
) -> None:
    gc.collect()
    found, foreseen = held_with_large_outputs(stand_in, name, n)
    assert found <= foreseen <= ABOVE * found + SMALL


def test_a_step_of_another_size_holds_what_was_foreseen_for_it(stand_in: Any) -> None:
    gc.collect()
    torch.manual_seed(0)
    model, rows = layers(500).cuda(), (torch.randn(24, 16).cuda(), torch.randint(5, (24,)).cuda())
    stand_in.clear_workspaces()
    engine = Engine(model, F.cross_entropy, memory="1GiB")
    for n in (16, 24, 12, 24):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        engine.backward(*(tensor[:n] for tensor in rows))
        assert engine.last is not None
        assert engine.last.predicted_bytes is not None
        assert torch.cuda.max_memory_allocated() <= engine.last.predicted_bytes


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_a_step_whose_values_hold_more_is_noticed_and_the_next_ones_fit(
    stand_in: Any, way: Any
) -> None:
    """By the allocator's own statistic, which shows a step that holds more than earlier ones."""
    gc.collect()
    torch.manual_seed(0)
    model, held = Values(way).double().cuda(), []
    stand_in.clear_workspaces()
    budget = 18 << 20  # 16.6 MiB are workspace and one sample
    engine = Engine(model, F.cross_entropy, memory=budget)
    for number, share in enumerate([0.02, 0.02, 0.01, 0.6, 0.6, 0.02, 0.6, 0.6]):
        x, y = (tensor.cuda() for tensor in batch(share, number))
        wanted = undivided(model, F.cross_entropy, x, y)
        torch.cuda.reset_peak_memory_stats()
        loss = engine.backward(x, y)
        held.append(torch.cuda.max_memory_allocated())
        assert_exact(state_of(model, loss), wanted)
        model.zero_grad()
        del x, y, wanted
    assert held[3] > budget, "else there is nothing to notice"
    assert max(held[4:]) <= budget
