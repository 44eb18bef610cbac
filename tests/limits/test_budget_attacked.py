"""What a hostile reader found in the budget: each a way to a wrong gradient, a trace, or a hang."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.peaks import metered
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import anybatch
from anybatch import Engine, Plan


def batch(size: int, width: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(size, width), torch.randint(0, 4, (size,))


class InPlace(nn.Module):
    """Normalises the batch it is given, in place, as data pipelines do."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.last, self.reads = nn.Linear(8, 4), reads

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(1.0).div_(2.0)
        if self.reads:
            float(x.sum())
        return self.last(x)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("memory", ["6KiB", "64MiB"])
def test_planning_does_not_write_to_the_batch_of_a_model_that_does(
    memory: str, *, reads: bool
) -> None:
    model, (x, y) = InPlace(reads=reads), batch(64)
    twin, inputs, theirs = copy.deepcopy(model), x.clone(), x.clone()
    F.cross_entropy(twin(theirs), y).backward()
    anybatch.plan(model, F.cross_entropy, (x, y), memory=memory)
    assert torch.equal(x, inputs)
    Engine(model, F.cross_entropy, memory=memory).backward(x, y)
    assert torch.equal(x, theirs)
    assert torch.equal(model.last.weight.grad, twin.last.weight.grad)


def test_what_hooks_add_up_elsewhere_hears_of_no_rehearsal() -> None:
    model, (x, y) = nn.Linear(8, 4), batch(64)
    twin, bank = copy.deepcopy(model), torch.zeros(4, 8)

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        bank.add_(parameter.grad)

    model.weight.register_post_accumulate_grad_hook(add)
    engine = Engine(model, F.cross_entropy, memory="64MiB")
    engine.backward(x, y)
    F.cross_entropy(twin(x), y).backward()
    assert torch.allclose(bank, twin.weight.grad)


def test_planning_leaves_counters_logs_and_means_as_they_were_and_no_fake() -> None:
    observed: list[Tensor] = []
    mean = {"loss": torch.zeros(())}

    class Counts(nn.Linear):
        calls, last = 0, None

        def forward(self, x: Tensor) -> Tensor:
            self.calls, self.last = self.calls + 1, x
            return super().forward(x)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        found = F.cross_entropy(outputs, targets)
        mean["loss"] = 0.9 * mean["loss"] + 0.1 * found.detach()
        return found

    model, (x, y) = Counts(8, 4), batch(64)
    model.register_forward_hook(lambda _module, _inputs, out: observed.append(out.detach()))
    anybatch.plan(model, loss, (x, y), memory="64MiB")
    assert (model.calls, model.last, observed) == (0, None, [])
    assert not isinstance(mean["loss"], FakeTensor)
    assert float(mean["loss"]) == 0.0


@cache
def positions(count: int) -> Tensor:
    return torch.arange(count).float()


def test_a_table_that_functools_keeps_is_real_after_planning() -> None:
    class Adds(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + positions(x.shape[1]))

    positions.cache_clear()
    model, (x, y) = Adds(8, 4), batch(64)
    loss = Engine(model, F.cross_entropy, memory="64MiB").backward(x, y)
    assert not any(isinstance(one, FakeTensor) for one in (loss, model.weight.grad, positions(8)))


def held(engine: Engine, run: Any) -> int:
    model = engine.model
    with metered(
        {
            "parameters": model.parameters(),
            "buffers": model.buffers(),
            "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        },
    ) as meter:
        run()
    return meter.peak


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss])
def test_a_mean_that_lies_in_the_memory_of_its_terms_is_foreseen(loss: Any) -> None:
    x, y = torch.randn(256, 64), torch.randn(256, 64)
    full = anybatch.plan(nn.Linear(64, 64), loss, (x, y), memory="1GiB", timed=False).memory
    assert full is not None
    engine = Engine(nn.Linear(64, 64), loss, memory=full.undivided)
    assert held(engine, lambda: engine.backward(x, y)) <= full.undivided


def test_unfreezing_is_another_sort_of_step() -> None:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)]
    model, (x, y) = nn.Sequential(*layers, nn.Linear(64, 4)), batch(256, 64)
    model[:6].requires_grad_(False)
    engine = Engine(model, F.cross_entropy, memory=400_000)
    engine.backward(x, y)
    model.zero_grad()
    model.requires_grad_(True)
    assert held(engine, lambda: engine.backward(x, y)) <= 400_000


def test_gradients_that_are_there_count_in_evaluate() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    x, y = torch.randn(512, 128), torch.randint(0, 128, (512,))
    engine = Engine(model, F.cross_entropy, memory=500_000)
    engine.evaluate(x, y)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert held(engine, lambda: engine.evaluate(x, y)) <= 500_000


def test_gradients_of_parameters_that_another_optimizer_has_are_there_in_the_update() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    mine = torch.optim.Adam(model[1].parameters(), foreach=True, amsgrad=True)
    pair = torch.randn(4, 64), torch.randint(0, 64, (4,))

    def predicted(optimizer: torch.optim.Optimizer) -> int:
        found = anybatch.plan(
            model, F.cross_entropy, pair, memory="1GiB", optimizer=optimizer, timed=False
        )
        assert found.memory is not None
        return found.memory.predicted

    engine = Engine(model, F.cross_entropy, memory="1GiB", optimizer=mine)

    def step() -> None:
        engine.backward(*pair)
        mine.step()

    before = predicted(mine)
    assert held(engine, step) <= before


def test_tensors_in_a_list_of_a_module_cost_a_rehearsal_nothing() -> None:
    class Holds(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 4)
            self.bank = [torch.zeros(500_000)]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.bank[0][:8])

    model, (x, y) = Holds(), batch(64)
    engine = Engine(model, F.cross_entropy, memory=100_000)
    assert held(engine, lambda: engine.backward(x, y)) <= 100_000


@pytest.mark.parametrize("micro_batch", [0, -3, 2.5, "8", True, None])
def test_a_plan_of_no_samples_is_none(micro_batch: Any) -> None:
    made = anybatch.plan(nn.Linear(8, 4), F.cross_entropy, batch(8), memory="1MiB", timed=False)
    text = json.dumps({**json.loads(made.to_json()), "micro_batch": micro_batch})
    with pytest.raises(ValueError, match="micro_batch must be an integer of at least 1"):
        Plan.from_json(text)
