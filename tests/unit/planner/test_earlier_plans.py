"""Plans that are stored: the next start of a program follows them, and ends in the same bits."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.planners import instead
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from anybatch.planner.earlier_plans import PlanFile, code_of, program

STEPS = 14


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks that tell anything: every start finds another size."""
    rng = random.Random(0)

    def noisy(planner: Any, signature: Any, n: int, seconds: float | None, **more: Any) -> None:
        took(planner, signature, n, seconds and rng.uniform(0.5, 1.5), **more)

    took = instead(monkeypatch, "took", noisy)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that remain."""
    found: list[str] = []
    monkeypatch.setattr("anybatch.planner.earlier_plans.say", found.append)
    return found


def streamed() -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4)]
    return nn.Sequential(*layers), torch.randn(64, 16)


def lanes() -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4)]
    return nn.Sequential(*layers), torch.randn(64, 16)


def start(
    make: Callable[[], tuple[nn.Module, Tensor]],
    cache: Path | None,
    steps: int = STEPS,
    **more: Any,
) -> tuple[list[int], list[Tensor], Engine]:
    """Train from the seed on; return the size of each step, the parameters, and the engine."""
    torch.manual_seed(0)
    model, x = make()
    y = torch.randint(4, (len(x),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"memory": "40KiB", "optimizer": optimizer} | more
    engine = Engine(model, F.cross_entropy, cache=cache, **options)
    sizes = []
    for k in range(steps):
        optimizer.zero_grad()
        engine.backward(x[: 40 if k % 5 == 4 else 64], y[: 40 if k % 5 == 4 else 64])
        optimizer.step()
        assert engine.last is not None
        sizes.append(engine.last.micro_batch)
    return sizes, [p.detach().clone() for p in model.parameters()], engine


@pytest.mark.large(few=1)
@pytest.mark.usefixtures("noise")
@pytest.mark.parametrize("make", [streamed, lanes])
def test_five_starts_end_in_the_same_bits(
    make: Callable[[], tuple[nn.Module, Tensor]], tmp_path: Path
) -> None:
    sizes, first, engine = start(make, tmp_path / "plans")
    assert len(set(sizes)) > 2  # several were tried
    assert engine._planner is not None
    assert engine._planner._foreseen.rehearsed
    for _ in range(4):
        again, parameters, engine = start(make, tmp_path / "plans")
        assert again == sizes
        assert all(map(torch.equal, parameters, first))
        assert engine._planner is not None
        assert engine._planner._foreseen.rehearsed == 0
        assert engine.plan is not None
        assert not any("still being found" in reason for reason in engine.plan.reasons)


@pytest.mark.usefixtures("noise")
def test_without_a_file_starts_differ_and_without_a_clock_they_do_not(tmp_path: Path) -> None:
    found = [start(streamed, None)[0] for _ in range(3)]
    assert len({tuple(sizes) for sizes in found}) > 1
    one, other = (start(streamed, None, tune="off") for _ in range(2))
    assert one[0] == other[0]
    assert all(map(torch.equal, one[1], other[1]))
    torch.use_deterministic_algorithms(True)
    try:
        assert start(streamed, None)[0] == one[0]
    finally:
        torch.use_deterministic_algorithms(False)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("noise")
def test_a_start_that_follows_knows_the_fastest_size_from_its_first_step(tmp_path: Path) -> None:
    """A checkpoint has it, and batches of other signatures go by it: the first plan is a trial."""
    sizes, _, first = start(streamed, tmp_path / "plans")
    for steps in (1, STEPS):
        _, _, engine = start(streamed, tmp_path / "plans", steps=steps)
        assert engine._fastest == first._fastest == sizes[-2]  # the last batch is a smaller one
    assert engine._steady is not None
    assert engine._steady.micro_batch == sizes[-2]


def test_a_plan_that_was_asked_for_is_followed_rather_than_an_earlier_start(
    tmp_path: Path,
) -> None:
    _, _, engine = start(streamed, tmp_path / "plans", tune="off", steps=1)
    torch.manual_seed(0)
    model, x = streamed()
    y, optimizer = torch.randint(4, (64,)), torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"memory": "40KiB", "tune": "off", "optimizer": optimizer}
    engine = Engine(model, F.cross_entropy, cache=tmp_path / "plans", **options)
    plan = engine.foresee(x, y, offload="off")
    assert plan.memory is not None
    engine.backward(x, y)
    assert engine._planner is not None
    assert engine._planner._foreseen.rehearsed == 1
    assert engine.last is not None
    assert engine.last.micro_batch == plan.micro_batch


def test_a_start_that_ends_before_the_search_keeps_nothing(tmp_path: Path) -> None:
    start(streamed, tmp_path / "plans", steps=3)
    assert not (tmp_path / "plans").exists()


class Other(nn.Sequential):
    """The same layers, called in another way."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_another_program_is_not_followed(tmp_path: Path) -> None:
    def wrapped() -> tuple[nn.Module, Tensor]:
        model, x = streamed()
        return Other(*model), x

    def wider() -> tuple[nn.Module, Tensor]:
        return nn.Sequential(nn.Linear(16, 65), nn.ReLU(), nn.Linear(65, 4)), streamed()[1]

    cache = tmp_path / "plans"
    start(streamed, cache)
    for make, more in [(wrapped, {}), (wider, {}), (streamed, {"memory": "39KiB"})]:
        _, _, engine = start(make, cache, steps=1, **more)
        assert engine._planner is not None
        assert engine._planner._foreseen.rehearsed == 1


@pytest.mark.parametrize("content", [b"", b"no database at all, " * 100])
def test_a_damaged_file_is_ignored_with_one_line(
    tmp_path: Path, said: list[str], content: bytes
) -> None:
    cache = tmp_path / "plans"
    cache.write_bytes(content)
    _, _, engine = start(streamed, cache, tune="off", steps=6)  # of two signatures
    assert engine._planner is not None
    assert engine._planner._foreseen.rehearsed == 1
    if content:
        (line,) = said
        assert str(cache) in line
        assert "are not followed" in line
        assert cache.read_bytes() == content
        return
    assert said == []
    assert start(streamed, cache, tune="off", steps=1)[2]._planner._foreseen.rehearsed == 0  # type: ignore[union-attr]


def test_a_plan_that_nobody_understands_is_ignored(tmp_path: Path, said: list[str]) -> None:
    cache = tmp_path / "plans"
    start(streamed, cache, tune="off", steps=2)
    with sqlite3.connect(cache) as file:
        file.execute("update plans set plan = '{}'")
    file.close()
    _, _, engine = start(streamed, cache, tune="off", steps=1)
    assert engine._planner is not None
    assert engine._planner._foreseen.rehearsed == 1
    assert "are not followed" in said[0]


def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "file").write_text("")
    start(streamed, tmp_path / "file" / "plans", tune="off", steps=2)
    (line,) = said
    assert "those of this one not kept" in line


def test_a_step_that_holds_more_than_was_kept_corrects_it(tmp_path: Path) -> None:
    cache = tmp_path / "plans"
    start(streamed, cache, tune="off", steps=2)
    with sqlite3.connect(cache) as file:
        file.execute("update plans set plan = json_set(plan, '$.memory.predicted', 1000)")
    file.close()
    _, _, engine = start(streamed, cache, tune="off", steps=2)
    assert engine.last is not None
    assert (engine.last.predicted_bytes or 0) > 1000


def test_what_a_first_step_has_held_more_is_in_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next start would hold more than its plan says, and go another way."""

    def more(self: Any, signature: Any, peak: int, *how: int, **named: bool) -> bool:
        return learn(self, signature, peak + 512, *how, **named)

    learn = instead(monkeypatch, "learn", more)
    cache = tmp_path / "plans"
    sizes, first, _ = start(streamed, cache, memory="60KiB")
    again, parameters, engine = start(streamed, cache, memory="60KiB")
    assert again == sizes
    assert all(map(torch.equal, parameters, first))
    assert engine._planner is not None
    assert engine._planner._foreseen.rehearsed == 0


def test_a_start_that_ran_out_of_memory_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(planner: Any, *arguments: Any, **more: Any) -> None:
        took(planner, *arguments, **more | {"failed": True})

    took = instead(monkeypatch, "took", failed)
    start(streamed, tmp_path / "plans", steps=3, tune="off")
    assert not (tmp_path / "plans").exists()


def test_plans_are_forgotten(tmp_path: Path) -> None:
    file = PlanFile(tmp_path / "plans")
    assert file.forget() == 0
    start(streamed, tmp_path / "plans", tune="off", steps=1)
    assert file.forget() == 1
    assert not (tmp_path / "plans").exists()
    (tmp_path / "plans").write_bytes(b"no database" * 200)
    assert file.forget() == 0
    assert not (tmp_path / "plans").exists()


def test_the_text_of_a_program_is_the_same_in_every_start() -> None:
    def of(model: nn.Module, loss: Any = F.mse_loss, *settings: Any) -> str:
        modules = [(path, module) for path, module in model.named_modules()]
        return program(modules, [loss], None, settings)

    one = of(nn.Linear(3, 4))
    assert one == of(nn.Linear(3, 4))
    assert one != of(nn.Linear(3, 4), F.l1_loss)
    assert one != of(nn.Linear(3, 4), F.mse_loss, 5)
    assert one != of(nn.Linear(3, 4, bias=False))
    assert one != of(nn.Linear(3, 4).double())
    assert one != of(nn.Linear(3, 4).requires_grad_(requires_grad=False))
    text = "lambda x: x in {'a', 'b', 'c'} and (lambda y: y + 1)(x)"
    assert code_of(eval(text)) == code_of(eval(text))
    assert code_of(eval(text)) != code_of(eval(text.replace("+ 1", "+ 2")))
    assert code_of(print) == "print"
