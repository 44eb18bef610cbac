"""The ladder: each model reaches the rung that it must, and the budget and the gradient hold."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.mbs.models import LSTM, ResNet
from tests.hiding import Hiding
from tests.oracle import assert_exact, same, snapshot, state_after, undivided
from tests.peaks import metered
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import anybatch
from anybatch import Engine, LazyBatch
from anybatch.errors import BudgetError
from anybatch.planner import ladder
from anybatch.planner.ladder import FAKE, PEAKS, REAL, ROUNDING, ROWS_AND_FAKES, SLACK

ON_FAKES = FAKE, ROWS_AND_FAKES


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h.relu() if float(h.detach().sum()) != 123.0 else h)


class Masks(Decides):
    def forward(self, x: Tensor) -> Tensor:
        retained = x.sum(1) > 0
        out = x.new_zeros(len(x), 3)
        out[retained] = self.b(self.a(x)[retained].relu())
        return out


class NoCopies(nn.Linear):
    def __deepcopy__(self, _: Any) -> NoCopies:
        raise TypeError("no copies")


class Several(Decides):
    def forward(self, x: Tensor, names: Any, z: Tensor, times: float) -> Tensor:
        assert len(names) == len(x)
        return self.b(self.a(x) + times * self.a(z))


def rows(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 8, dtype=torch.float64), torch.randint(0, 3, (n,))


def shifted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


def untimed(model: nn.Module, loss: Any, memory: int) -> Engine:
    """An engine that chooses by memory alone."""
    engine = Engine(model, loss, memory=memory)
    assert engine._planner is not None
    engine._planner.timed = False
    return engine


@pytest.mark.large
@pytest.mark.parametrize("n", [1, 2, 5, 8, 9, 40])
@pytest.mark.parametrize(
    ("make", "how"),
    [
        (
            lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)),
            {FAKE, ROWS_AND_FAKES},
        ),
        (Decides, {REAL}),
        (Masks, {REAL, PEAKS}),
    ],
    ids=["plain", "reads a value", "boolean masks"],
)
def test_every_rung_plans_and_the_gradient_is_exact(
    make: Callable[[], nn.Module], how: set[str], n: int
) -> None:
    model, (x, y) = make().double(), rows(n)
    memory = anybatch.plan(model, F.cross_entropy, (x, y), memory="1MiB", timed=False).memory
    assert memory is not None
    assert memory.how in how
    budget = max(memory.floor, (memory.floor + memory.undivided) // 2)
    budget += 0 if memory.how in ON_FAKES else ROUNDING
    for loss in (F.cross_entropy, shifted):
        got = state_after(model, lambda m, f=loss: untimed(m, f, 2 * budget).backward(x, y))
        assert_exact(got, undivided(model, loss, x, y))


@pytest.mark.large(few=2)
@pytest.mark.parametrize(
    "inputs",
    [
        lambda x: (x, [str(i) for i in range(len(x))], x.flip(0), 2.0),
        lambda x: {"x": x, "names": tuple("ab" * 10), "z": x.flip(0), "times": 2.0},
        lambda x: {"x": x, "names": np.arange(20), "z": x.flip(0), "times": 2.0},
    ],
    ids=["tuple", "mapping", "array"],
)
@pytest.mark.parametrize("loss", [F.cross_entropy, shifted])
def test_inputs_with_leaves_that_are_no_tensors_are_rehearsed_without_data(
    inputs: Callable[[Tensor], Any], loss: Callable[..., Tensor]
) -> None:
    model, (x, y) = Several().double(), rows(20)
    batch_inputs = inputs(x)
    memory = anybatch.plan(model, loss, (batch_inputs, y), memory="1MiB", timed=False).memory
    assert memory is not None
    assert memory.how in ON_FAKES
    budget = (memory.floor + memory.undivided) // 2
    got = state_after(model, lambda m: Engine(m, loss, memory=budget).backward(batch_inputs, y))
    assert_exact(got, undivided(model, loss, batch_inputs, y))


def planned_and_run(model: nn.Module) -> tuple[str, int, int]:
    """Return how a step within 2 MiB was foreseen, and its peaks, measured and predicted."""
    x = torch.randint(0, 64, (32, 20))
    engine = Engine(lambda_model(model), nn.CrossEntropyLoss(), memory="2MiB")
    engine.foresee(x, x, offload="off")  # by time "auto" may let saved tensors leave
    engine.backward(x, x)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.last is not None
    assert engine.last.peak_bytes is not None
    assert engine.last.peak_bytes <= engine.last.predicted_bytes <= 2 << 20
    return engine.plan.memory.how, engine.last.peak_bytes, engine.last.predicted_bytes


def test_a_workspace_that_no_fake_knows_of_is_found_out() -> None:
    how, _, _ = planned_and_run(Hiding())
    assert how == REAL


def test_the_workspace_of_an_lstm_is_foreseen_without_data() -> None:
    how, measured, predicted = planned_and_run(LSTM())
    assert how == FAKE
    assert predicted <= 1.05 * measured


def test_rows_that_are_parts_of_larger_ones_are_rehearsed_as_they_lie_in_memory() -> None:
    model, tokens = LSTM(), torch.randint(0, 64, (32, 21))
    x, y = tokens[:, :-1], tokens[:, 1:]  # of these a loss makes a copy when it flattens them

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    engine = Engine(model, loss, memory="2MiB")
    engine.foresee(x, y, offload="off")
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.plan.memory.how == FAKE
    assert engine.last is not None
    assert engine.last.peak_bytes is not None
    assert engine.last.peak_bytes <= engine.last.predicted_bytes <= 1.05 * engine.last.peak_bytes


WEIGHTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "tensor": (lambda _: torch.tensor([1.0, 2.0, 3.0]), "streaming"),
    "of a device": (lambda out: torch.tensor([1.0, 2.0, 3.0], device=out.device), "streaming"),
    "as_tensor": (lambda out: torch.as_tensor([1.0, 2.0, 3.0], device=out.device), "streaming"),
    "arithmetic": (lambda _: torch.arange(1, 4).float() / 6, "streaming"),
    "ones": (lambda _: torch.ones(3), "two-pass"),
    "drawn": (lambda _: torch.rand(3), "two-pass"),  # others each time: no sum over samples
    "of the size": (lambda out: torch.tensor([1.0, 2.0, float(len(out))]), "two-pass"),
}


@pytest.mark.parametrize("made", WEIGHTS)
def test_class_weights_that_a_loss_makes_are_rehearsed_without_data(made: str) -> None:
    weights, mechanism = WEIGHTS[made]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, weight=weights(out))

    torch.manual_seed(0)
    x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
    engine = Engine(nn.Linear(8, 3), loss, memory="1MiB", micro_batch=4)
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.plan.memory.how in ON_FAKES
    assert engine.plan.mechanism == mechanism
    assert engine.last is not None
    assert engine.last.peak_bytes is not None
    assert engine.last.peak_bytes <= engine.last.predicted_bytes <= 1.05 * engine.last.peak_bytes


def lambda_model(model: nn.Module) -> nn.Module:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).transpose(1, 2)

    return Turned()


def test_a_model_that_cannot_be_copied_is_measured() -> None:
    model, (x, y) = NoCopies(8, 3).double(), rows(20)
    loss = F.cross_entropy(model(x), y)
    want = torch.autograd.grad(loss, list(model.parameters()))
    engine = Engine(model, F.cross_entropy, memory="1MiB")
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.plan.memory.how in (REAL, PEAKS)
    for p, g in zip(model.parameters(), want, strict=True):
        assert p.grad is not None
        assert torch.allclose(p.grad, g, rtol=0, atol=1e-14)


@pytest.mark.parametrize("loss", [F.cross_entropy, shifted])
@pytest.mark.parametrize("n", [4, 30])
def test_a_lazy_batch_is_planned_from_a_few_rows(loss: Callable[..., Tensor], n: int) -> None:
    model, (x, y) = Decides().double(), rows(n)
    model.forward = lambda x: model.b(model.a(x).relu())  # type: ignore[method-assign]
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    for memory in ("1MiB", "8KiB"):
        got = state_after(
            plain,
            lambda m, b=memory: Engine(m, loss, memory=b).backward(LazyBatch(TensorDataset(x, y))),
        )
        assert_exact(got, undivided(plain, loss, x, y))


def stepped(
    model: nn.Module, x: Tensor, y: Tensor, **options: Any
) -> tuple[dict[str, Tensor], Engine]:
    engines: list[Engine] = []

    def run(copied: nn.Module) -> Tensor:
        engines.append(Engine(copied, F.cross_entropy, **options))
        return engines[0].backward(x, y)

    return state_after(model, run), engines[0]


def test_larger_real_steps_tell_what_two_small_ones_do_not() -> None:
    """A line through these, which may round much up, is a fifth too steep."""
    model, (x, y) = Decides().double(), rows(100)
    engine = Engine(model, F.cross_entropy, memory="1GiB")
    plan = engine.foresee(x, y, timed=False)
    engine.backward(x, y)
    assert plan.memory is not None
    assert plan.memory.how == REAL
    assert engine.last is not None
    assert engine.last.peak_bytes is not None
    assert engine.last.peak_bytes <= plan.memory.predicted <= 1.1 * engine.last.peak_bytes


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(2, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cells(x.unflatten(1, (4, 2)))[1][0]
        return out


def centred(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


@pytest.mark.parametrize(
    ("make", "loss", "size"),
    [(lambda: nn.Linear(8, 3), centred, 1), (Recurrent, F.cross_entropy, 8)],
)
def test_what_fits_as_it_is_is_not_refused_for_a_line_above_it(
    make: Callable[[], nn.Module], loss: Any, size: int
) -> None:
    model, (x, y) = make().double(), rows(size)
    free = anybatch.plan(model, loss, (x, y), memory="1GiB", micro_batch=1, timed=False).memory
    assert free is not None
    plan = anybatch.plan(model, loss, (x, y), memory=free.predicted, timed=False)
    assert (plan.micro_batch, plan.offload) == (1, None)


def test_batchnorm_is_undivided_where_that_fits_and_in_lanes_within_the_budget_where_not() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).double()
    x, y = rows(64)
    want = undivided(model, F.cross_entropy, x, y)
    memory = anybatch.plan(model, F.cross_entropy, (x, y), memory="1MiB", timed=False).memory
    assert memory is not None
    cases = [
        (memory.undivided, None, "undivided"),
        (memory.undivided - 1, 32, "lockstep"),
        ((memory.floor + memory.undivided) // 2, 16, "lockstep"),
    ]
    for budget, micro_batch, mechanism in cases:
        got, engine = stepped(model, x, y, memory=budget, micro_batch=micro_batch)
        assert_exact(got, want)
        assert engine.plan is not None
        assert engine.plan.mechanism == mechanism
        assert engine.last is not None
        assert engine.last.peak_bytes is not None
        assert engine.last.peak_bytes <= budget
    assert engine.last.moved_bytes > 0
    before = snapshot(model)
    with pytest.raises(
        anybatch.errors.BudgetError, match="with micro-batches of one sample it needs"
    ):
        Engine(model, F.cross_entropy, memory=memory.floor - 1).backward(x, y)
    assert same(before, snapshot(model))
    Engine(model, F.cross_entropy, memory=memory.undivided - 1, batchnorm="local").backward(x, y)


def test_a_plan_for_batchnorm_says_what_waits_and_is_obeyed() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).double()
    x, y = rows(64)
    full = anybatch.plan(model, F.cross_entropy, (x, y), memory="1MiB", timed=False).memory
    assert full is not None
    plan = anybatch.plan(
        model, F.cross_entropy, (x, y), memory=full.undivided // 2, micro_batch=16, timed=False
    )
    assert (plan.mechanism, plan.micro_batch) == ("lockstep", 16)
    assert plan.memory is not None
    assert 0 < np.min(plan.memory.waiting_capacity) < plan.memory.budget
    again = anybatch.Plan.from_json(plan.to_json())
    assert again == plan
    got = state_after(model, lambda m: Engine(m, F.cross_entropy, plan=again).backward(x, y))
    assert_exact(got, undivided(model, F.cross_entropy, x, y))


class Around(torch.optim.Optimizer):
    """Wraps another optimizer, as ZeRO or Lookahead do, and steps it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


def test_no_rehearsal_steps_an_optimizer_of_the_person() -> None:
    model, (x, y) = nn.Linear(8, 3).double(), rows(20)
    called: list[str] = []
    plain = torch.optim.AdamW(model.parameters())
    plain.register_step_pre_hook(lambda *_: called.append("before"))
    plain.register_step_post_hook(lambda *_: called.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(plain, 2)
    wrapped = Around(torch.optim.SGD(model.parameters(), lr=1.0))
    for optimizer in (plain, wrapped):
        before = snapshot(model, optimizer)
        plan = anybatch.plan(model, F.cross_entropy, (x, y), memory="1MiB", optimizer=optimizer)
        assert same(before, snapshot(model, optimizer))
        assert plan.memory is not None
        assert plan.memory.predicted >= 4 * 8 * 27  # parameters, gradients, two of state
    assert called == []
    assert plain.state == {}
    assert schedule.last_epoch == 0


def test_a_forecast_is_close_and_never_below_what_is_measured() -> None:
    x, y = torch.randn(24, 3, 16, 16), torch.randint(0, 10, (24,))
    for size in (2, 3, 8, 24):
        model = ResNet(width=8, blocks=(1, 1))
        engine = Engine(model, F.cross_entropy, memory="64MiB", micro_batch=max(1, size // 3))
        engine.backward(x[:size], y[:size])
        assert engine.last is not None
        assert engine.last.predicted_bytes is not None
        assert engine.last.peak_bytes is not None
        assert engine.last.peak_bytes <= engine.last.predicted_bytes


def test_a_step_of_single_samples_is_rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fakes, compared with a real one where they tell all; the plan names its bytes."""
    made, divided = [], ladder.rehearsal.divided

    def noted(case: Any, n: int, *args: Any, **options: Any) -> Any:
        made.append((case.fake, n))
        return divided(case, n, *args, **options)

    monkeypatch.setattr(ladder.rehearsal, "divided", noted)
    for quick, real in ((1 << 30, 0), (0, 1)):
        monkeypatch.setattr(ladder, "QUICK", quick)
        rows = torch.randn(20, 3), torch.randint(2, (20,))
        anybatch.plan(nn.Linear(3, 2), F.cross_entropy, rows, memory="1MiB", timed=False)
        assert (made.count((True, 1)), made.count((False, 1))) == (1, real)
        made.clear()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.words((x.abs() * 9).long() % 20)) @ self.words.weight.t()


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.mul_(2)).relu())


class Pads(Writes):
    """Pads rows to a multiple of 8, so that two sizes tell nothing of a larger one."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.pad(self.a(x), (0, 0, 0, -len(x) % 8)).relu())[: len(x)]


def of_words(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out[:, 0], y)


def layers(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *more, nn.Linear(16, 3))


def images() -> nn.Module:
    middle = nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 4)), *middle, nn.Flatten(), nn.Linear(12, 3))


FEW_ROWS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "streamed": (lambda: layers(nn.Tanh()), F.cross_entropy),
    "coupled": (lambda: layers(nn.Tanh()), shifted),
    "lanes": (lambda: layers(nn.BatchNorm1d(16), nn.ReLU()), F.cross_entropy),
    "dropout": (lambda: layers(nn.Dropout()), F.cross_entropy),
    "images": (images, F.cross_entropy),
    "words": (Words, of_words),
    "writes to its inputs": (Writes, F.cross_entropy),
    "pads": (Pads, F.cross_entropy),
}


@pytest.mark.large(few=4)
@pytest.mark.parametrize("name", FEW_ROWS)
def test_real_rows_and_fakes_have_the_same_bytes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of a step at each size, and the findings; real rows are run where they fit."""
    make, loss = FEW_ROWS[name]
    model, (x, y) = make(), rows(40)
    x = x.float()
    before = x.clone()
    found, made, divided = [], [], ladder.rehearsal.divided

    def noted(case: Any, n: int, *args: Any, **options: Any) -> Any:
        made.append(case.fake)
        return divided(case, n, *args, **options)

    monkeypatch.setattr(ladder.rehearsal, "divided", noted)
    for least_rows in (32, 41):
        monkeypatch.setattr(ladder, "ROWS", least_rows)
        monkeypatch.setattr(ladder, "QUICK", 0)
        engine = Engine(model, loss, memory="64MiB", cache=None)
        engine.foresee(x, y, timed=False)
        assert made[0] is (least_rows == 41 or name == "pads")
        if not made[0] and name != "lanes":
            assert sum(made) == 1  # of one sample: the size that was chosen is on its line
        made.clear()
        assert engine._planner is not None
        ((_, forecast),) = engine._planner._foreseen._stored
        found.append(forecast)
    real, fakes = found
    assert replace(real.inspection, shows=0) == replace(fakes.inspection, shows=0)
    for n in (1, 2, 3, 7, 39, 40):
        assert abs(real.peak(n, 40) - fakes.peak(n, 40)) <= SLACK, n
        assert abs(real.confirm(n, 40) - fakes.confirm(n, 40)) <= SLACK, n
    assert torch.equal(x, before)


@pytest.mark.large(few=2)
@pytest.mark.parametrize("name", FEW_ROWS)
def test_real_rows_are_run_where_they_fit(
    name: str, monkeypatch: pytest.MonkeyPatch, some: Callable[..., list[int]]
) -> None:
    """A forecast by real rows holds no more than the budget, at any number of bytes."""
    make, loss = FEW_ROWS[name]
    model, (x, y) = make(), rows(40)
    x, real = x.float(), list[bool]()
    run = ladder.rehearsal.full_batch

    def noted(case: Any, n: int, *more: Any, **options: Any) -> Any:
        real.append(not case.fake)
        return run(case, n, *more, **options)

    monkeypatch.setattr(ladder.rehearsal, "full_batch", noted)
    plan = anybatch.plan(model, loss, (x, y), memory="64MiB", timed=False)
    assert plan.memory is not None
    most, ran = plan.memory.undivided, 0
    assert any(real)
    for budget in some(range(most // 16, most, most // 16), 4):
        real.clear()
        owned = {"parameters": model.parameters(), "buffers": model.buffers()}
        with metered(owned) as meter, suppress(BudgetError):
            anybatch.plan(model, loss, (x, y), memory=budget, timed=False, offload="off")
        ran += any(real)
        assert meter.peak <= budget or not any(real)
    assert ran > 0


class Buckets(nn.Module):
    """Pads rows to the next of some numbers, of which 64 is the last."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        more = next(m for m in (1, 2, 3, 4, 8, 16, 32, 64) if m >= n) - n
        h = torch.tanh(self.body(F.pad(x, (0, 0, 0, 0, 0, more))))
        return self.head(h).mean((1, 2))[:n]


def test_a_size_between_few_rows_and_all_is_foreseen_as_it_is() -> None:
    """Few rows lead to the bytes of all 64, and tell nothing of 22, which are padded to 32."""
    engine = Engine(Buckets(), F.mse_loss, memory=2_400_000, cache=None)
    engine.backward(torch.randn(64, 200, 32), torch.randn(64))
    assert engine.last is not None
    assert engine.last.peak_bytes is not None
    assert engine.last.predicted_bytes is not None
    assert engine.last.micro_batch < 64
    assert engine.last.peak_bytes <= engine.last.predicted_bytes <= 2_400_000
