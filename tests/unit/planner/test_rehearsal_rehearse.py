"""A rehearsal without data shows the same bytes as one with, and both put everything back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.mbs.models import MLP, ResNet, TransformerLM
from tests.cases import case_of
from tests.oracle import assert_exact, same, snapshot, state_of, undivided
from tests.peaks import metered
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.planner import rehearsal
from anybatch.planner.rehearsal import NotAffineError, Timeline


def shifted(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


def tokenwise(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def dropping() -> nn.Module:
    return nn.Sequential(MLP(8, 16, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 7))


MODELS: list[Callable[[], tuple[nn.Module, Tensor]]] = [
    lambda: (ResNet(7, 4, (1, 1)), torch.randn(24, 3, 8, 8)),
    lambda: (dropping(), torch.randn(24, 8)),
]


@pytest.mark.parametrize("loss", [F.cross_entropy, shifted])
@pytest.mark.parametrize("make", MODELS, ids=["convolutions", "dropout and BatchNorm"])
def test_fakes_and_real_rows_show_the_same_peaks(
    make: Callable[[], tuple[nn.Module, Tensor]], loss: Callable[..., Tensor]
) -> None:
    model, x = make()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    y = torch.randint(0, 7, (24,))
    real = case_of(model, loss, x, y, batchnorm="local")
    before = snapshot(model)
    fake = case_of(model, loss, x, y, fakes=True, batchnorm="local")
    peaks: dict[str, list[int]] = {}
    for name, it in (("real", real), ("fake", fake)):
        _, observed = rehearsal.inspect_model(it, 4)
        observed = rehearsal.watch_loss(it, observed)
        assert observed.coupled is (loss is shifted)
        peaks[name] = [
            *(
                rehearsal.divided(it, n, observed, accumulator=a).peak
                for n in (2, 5)
                for a in (True, False)
            ),
            *(rehearsal.full_batch(it, n)[0].peak for n in (2, 24)),
        ]
        assert same(before, snapshot(model))
    # A loss of a person's own is compared with itself, two rows of it: on fakes alone, because
    # a real call might count where nothing can undo it.
    more = 6 * 2 * 7 * 4 if loss is shifted else 0
    for real_peak, fake_peak in zip(peaks["real"], peaks["fake"], strict=True):
        assert 0.98 * real_peak <= fake_peak <= 1.02 * real_peak + more


def test_tied_weights_count_once() -> None:
    model = TransformerLM(64, 16, 1, 2, 32, tied=True)
    x = torch.randint(0, 64, (12, 16))
    it = case_of(model, tokenwise, x, x, fakes=True)
    found = rehearsal.full_batch(it, 2)[0].at_peak()
    assert found["parameters"] == sum(p.nbytes for p in model.parameters())


def test_a_rehearsal_holds_nothing_when_it_is_over() -> None:
    model = MLP(8, 16, 7).bfloat16()
    it = case_of(model, F.cross_entropy, torch.randn(24, 8).bfloat16(), torch.randint(0, 7, (24,)))
    _, observed = rehearsal.inspect_model(it, 4)
    gc.collect()
    gc.disable()  # what lies in a circle would be found later, and counts until then
    try:
        with metered() as meter:
            rehearsal.divided(it, 2, observed, accumulator=False)
            rehearsal.full_batch(it, 2)
        assert meter.live == 0
    finally:
        gc.enable()


class Captures(nn.Module):
    """Installs a hook at its first forward, as models of transformers do to collect outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 7)
        self.installed = False
        self.observed: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        """[n, 8] -> [n, 7]."""
        if not self.installed:
            self.inner.register_forward_hook(
                lambda *arguments: self.observed.append(len(arguments[2]))
            )
            self.installed = True
        self.observed.clear()
        out: Tensor = self.inner(x)
        assert self.observed == [len(x)]  # one hook, and not one for each rehearsal
        return out * float(x[0, 0] * 0 + 1)  # a value is read, so rows are real


def test_hooks_that_forward_installs_go_with_the_rehearsal() -> None:
    model, rows = Captures(), (torch.randn(24, 8), torch.randint(7, (24,)))
    anybatch.plan(model, nn.CrossEntropyLoss(), rows, memory="1MiB", timed=False)
    assert not model.inner._forward_hooks
    assert not model.installed
    engine = anybatch.Engine(model, nn.CrossEntropyLoss(), memory="1MiB", micro_batch=5)
    for _ in range(2):
        engine.backward(*rows)
    assert len(model.inner._forward_hooks) == 1


BY_SAMPLES = anybatch.Loss.inside(count=lambda rows, _: len(rows))


class Spread(nn.Module):
    """Its loss takes 4 KiB for each pair of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 512)
        self.spread = anybatch.coupled(spread)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 64] -> the loss."""
        loss: Tensor = self.spread(self.inner(x))
        return loss


def spread(h: Tensor) -> Tensor:
    return (h[:, None] - h[None]).abs().sum(1).mean()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_more_samples_meet_in_a_rehearsal_than_in_the_step(size: int) -> None:
    torch.manual_seed(size)
    model, x = Spread().double(), torch.randn(size, 64, dtype=torch.float64)
    engine = anybatch.Engine(model, BY_SAMPLES, memory="900kB", micro_batch=1 + size // 3)
    want = undivided(model, lambda loss: loss, x, None)
    assert_exact(state_of(model, engine.backward(x)), want)
    assert engine.last is not None
    assert engine.last.peak_bytes is not None
    assert engine.last.predicted_bytes is not None
    assert engine.last.peak_bytes <= engine.last.predicted_bytes <= 900_000


def test_next_to_a_lane_what_waits_has_no_parameters_of_its_own() -> None:
    model, x = Spread(), torch.randn(4, 64)
    engine = anybatch.Engine(model, BY_SAMPLES, memory="1GiB", micro_batch=1)
    engine.backward(x)
    assert engine.plan is not None
    memory, last = engine.plan.memory, engine.last
    assert memory is not None
    assert last is not None
    assert last.peak_bytes is not None
    states = sum(p.numel() * p.element_size() for p in model.parameters())
    assert last.peak_bytes <= memory.predicted <= memory.floor + memory.undivided - states


def test_the_casts_of_weights_are_counted_in_every_rehearsal() -> None:
    """The second of two found those of the first, so their events differed: a guess remained."""
    torch.manual_seed(0)
    model, x, y = MLP(64, 256, 5), torch.randn(64, 64), torch.randint(5, (64,))
    with torch.autocast("cpu", torch.bfloat16):
        model(x)  # whose casts are kept, too
        plan = anybatch.plan(model, F.cross_entropy, (x, y), memory="64MiB", timed=False)
        engine = anybatch.Engine(model, F.cross_entropy, plan=plan)
        model.zero_grad()
        with metered({"all": model.parameters()}) as meter:
            engine.backward(x, y)
    assert plan.memory is not None
    assert "fake tensors" in plan.memory.how
    assert plan.memory.predicted == meter.peak


def line_of(*rows: tuple[int, int]) -> Timeline:
    return Timeline(("a", "b"), tuple(map(str, range(len(rows)))), np.array(rows, np.int64))


def test_steps_of_few_rows_lead_to_one_of_many_by_lines_and_parabolas() -> None:
    def step(n: int) -> Timeline:
        return line_of((5, n), (7 * n, n * n), (3 + n * n, 2 * n))

    def straight(n: int) -> Timeline:
        return line_of((5, n), (7 * n, 4), (3 + n, 2 * n))

    for n in (1, 2, 3, 4, 5, 64):
        found = rehearsal.extrapolated([step(2), step(3), step(4)], 2, n)
        assert np.array_equal(found.live, step(n).live)
        found = rehearsal.extrapolated([straight(2), straight(3)], 2, n)
        assert np.array_equal(found.live, straight(n).live)
    assert not np.array_equal(rehearsal.extrapolated([step(2), step(3)], 2, 64).live, step(64).live)
    with pytest.raises(NotAffineError):
        rehearsal.extrapolated([step(2), line_of((5, 3))], 2, 4)


def test_a_line_may_hold_more_than_a_step_and_nothing_less() -> None:
    step = line_of((1, 0), (1, 0), (4, 2), (1, 0))
    more = line_of((1, 0), (4, 2), (3, 3), (1, 0), (1, 0))
    assert rehearsal.holds_all_of(step, step)
    assert rehearsal.holds_all_of(more, step)
    assert not rehearsal.holds_all_of(step, more)
    assert not rehearsal.holds_all_of(line_of((4, 2), (1, 0)), step)  # in another order
    assert not rehearsal.holds_all_of(line_of((1, 0), (4, 1), (1, 0)), step)
    other = Timeline(("a", "c"), step.events, step.live)
    assert not rehearsal.holds_all_of(other, step)


@pytest.mark.parametrize("memory", ["100KiB", "300KiB"])
def test_rehearsals_of_a_decision_follow_python_once(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transformer reaches thousands of functions, and is rehearsed dozens of times."""
    followed = []
    follow = rehearsal.PythonState.modules

    def counted(state: Any, modules: Any, **named: Any) -> None:
        followed.append(named)
        follow(state, modules, **named)

    monkeypatch.setattr(rehearsal.PythonState, "modules", counted)
    model, rows = MLP(8, 64, 64, 7), (torch.randn(512, 8), torch.randint(7, (512,)))
    assert anybatch.plan(model, F.cross_entropy, rows, memory=memory, timed=False).micro_batch < 512
    assert 0 < len(followed) <= 6
