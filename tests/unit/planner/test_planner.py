from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.mbs.models import ResNet
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.execution.signature import Signature


def signature_of(shape: tuple[int, ...], size: int = 8, **more: Any) -> Signature:
    options: dict[str, Any] = {"tensors": ("x", "f32"), "modes": (True,), "numbers": ()}
    options |= {"lanes": False, "trains": True, "before": 0}
    return Signature(shapes=(shape,), size=size, **(options | more))


def test_what_bounds_what() -> None:
    assert signature_of((4, 4)).bounds(signature_of((4, 3)))
    assert not signature_of((4, 4)).bounds(signature_of((2, 5)))
    forward_only = signature_of((4, 4), trains=False)
    assert signature_of((4, 4)).bounds(forward_only)
    eval_mode = signature_of((4, 4), trains=False, modes=(False,))
    assert not signature_of((4, 4)).bounds(eval_mode)  # a model may do more when it is tested
    assert not forward_only.bounds(signature_of((4, 4)))
    assert not signature_of((4, 4)).bounds(signature_of((4, 4), tensors=("x", "f64")))
    assert not signature_of((4, 4)).bounds(signature_of((4, 4), modes=(False,)))
    assert not signature_of((4, 4)).bounds(
        signature_of((4, 4), lanes=True)
    )  # what waits is held beside it


def images(n: int, side: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, side, side), torch.randint(0, 7, (n,))


def test_a_batch_that_fits_as_it_is_is_not_refused_for_a_bound_that_does_not() -> None:
    model = ResNet(7, 4, (1, 1))
    exact = anybatch.plan(model, F.cross_entropy, images(8, 36), memory="1GiB", timed=False)
    rounded = anybatch.plan(model, F.cross_entropy, images(8, 64), memory="1GiB", timed=False)
    assert exact.memory is not None
    assert rounded.memory is not None
    budget = exact.memory.floor + 4096
    assert budget < rounded.memory.floor
    engine = Engine(model, F.cross_entropy, memory=budget)
    for side in (8, 36, 35, 36):
        engine.backward(*images(8, side))
        model.zero_grad()
    assert engine._planner is not None
    assert engine._planner._foreseen.rehearsed <= 4


def test_batchnorm_that_fits_undivided_is_not_refused_for_a_bound_that_does_not() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    exact = anybatch.plan(model, F.cross_entropy, images(8, 36), memory="1GiB", timed=False)
    assert exact.memory is not None
    engine = Engine(model, F.cross_entropy, memory=exact.memory.undivided + 64)
    for side in (8, 36):
        x, y = images(8, side)
        engine.backward(x, y % 4)
        model.zero_grad()


def test_what_a_step_has_really_held_is_learnt() -> None:
    retained: list[Tensor] = []

    class Leaks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 10 and not isinstance(x, FakeTensor):  # more than a rehearsal sees
                retained.append(x.new_zeros(1000))
            return super().forward(x)

    model, x, y = Leaks(5, 3), torch.randn(40, 5), torch.randint(0, 3, (40,))
    engine = Engine(model, F.cross_entropy, memory="1MiB", micro_batch=10)
    reports = []
    for n in (40, 30):
        engine.backward(x[:n], y[:n])
        model.zero_grad()
        reports.append(engine.last)
    first, second = reports
    assert first is not None
    assert second is not None
    assert first.peak_bytes is not None
    assert first.predicted_bytes is not None
    assert second.predicted_bytes is not None
    assert first.peak_bytes > first.predicted_bytes + 8000
    assert second.predicted_bytes > first.predicted_bytes


def test_a_last_partial_batch_keeps_the_plan() -> None:
    model, (x, y) = ResNet(7, 4, (1, 1)), images(12, 16)
    memory = anybatch.plan(model, F.cross_entropy, (x, y), memory="1GiB", timed=False).memory
    assert memory is not None
    engine = Engine(model, F.cross_entropy, memory=(memory.floor + memory.undivided) // 2)
    engine.backward(x, y)
    plan = engine.plan
    for n in (5, 1, 12):
        engine.backward(x[:n], y[:n])
        assert engine.last is not None
        assert engine.last.samples == n
    assert engine._planner is not None
    assert engine._planner._foreseen.rehearsed == 1
    assert plan is not None


def test_a_schedule_from_and_to_nothing_keeps_the_plan() -> None:
    model, (x, y) = nn.Linear(5, 3), (torch.randn(12, 5), torch.randint(3, (12,)))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(model, F.cross_entropy, optimizer=optimizer, memory="1MiB")
    engine.foresee(x, y)
    rates = (0.0, 1.0, 0.5, 0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates.__getitem__)
    for _ in rates[1:]:
        engine.backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert schedule.get_last_lr() == [0]
    engine.backward(x, y)
    assert engine._planner is not None
    assert engine._planner._foreseen.rehearsed == 1


def test_batchnorm_is_never_divided_because_that_would_be_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anybatch.planner.resident_memory.CACHED", 1)  # smaller may be faster
    model, (x, y) = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7)), images(12, 8)
    loss = nn.CrossEntropyLoss()
    engine = Engine(model, loss, memory="1GiB")
    for _ in range(3):
        engine.backward(x, y[:, None, None].expand(-1, 6, 6))
        assert engine.plan is not None
        assert engine.plan.mechanism == "undivided"


def test_a_division_that_needs_more_than_the_full_batch_is_never_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anybatch.planner.resident_memory.CACHED", 1)  # smaller may be faster
    model = nn.Linear(500, 3).bfloat16()  # sums of gradients in float32 are the most of it
    x, y = torch.randn(9, 500).bfloat16(), torch.randint(0, 3, (9,))
    memory = anybatch.plan(model, F.cross_entropy, (x, y), memory="1MiB", timed=False).memory
    assert memory is not None
    assert memory.undivided < memory.floor
    budget = (memory.undivided + memory.floor) // 2
    engine = Engine(model, F.cross_entropy, memory=budget)
    for peak in (True, False, False):
        engine.backward(x, y)
        assert engine.last is not None
        assert engine.last.micro_batch == 9
        assert not peak or (engine.last.peak_bytes or budget) <= budget
        model.zero_grad()
    with pytest.raises(anybatch.errors.BudgetError, match="give micro_batch=9, or leave it out"):
        Engine(model, F.cross_entropy, memory=budget, micro_batch=4).backward(x, y)


def test_batchnorm_is_not_divided_for_a_bound_alone() -> None:
    """A bound of larger images did not fit undivided, and in lanes it did."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    exact, bound = (
        anybatch.plan(model, F.cross_entropy, images(8, side), memory="1GiB", timed=False).memory
        for side in (36, 64)
    )
    assert exact is not None
    assert bound is not None
    budget = max(exact.undivided, bound.floor) + 64
    assert budget < bound.undivided
    engine = Engine(model, F.cross_entropy, memory=budget)
    for side in (8, 36):
        x, y = images(8, side)
        engine.backward(x, y % 4)
        model.zero_grad()
    assert engine.last is not None
    assert engine.last.micro_batches == 1


class ReadsANumber(nn.Embedding):
    """Has to be measured on real rows."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * (1 + 0 * float(self.weight.detach().sum()))).mT


def test_a_loss_that_counts_over_all_targets_has_room_for_them_at_other_lengths() -> None:
    model, n = ReadsANumber(5, 5), 600
    engine = Engine(model, F.cross_entropy, memory="1GiB", micro_batch=2)
    for length in (4, 12):
        x = torch.randint(5, (n, length))
        y = x.clone()
        y[0, 0] = -100
        engine.backward(x, y)
        model.zero_grad()
        assert engine.last is not None
        assert engine.last.peak_bytes is not None
        assert engine.last.predicted_bytes is not None
        assert engine.last.peak_bytes <= engine.last.predicted_bytes
