"""Lanes, often and at random: thousands of steps, an error at every place, a Ctrl-C at any moment.

A lane stops in the middle of forward and of backward, as a thread that holds a baton. What could go
wrong shows in the interplay, not in one example: an engine that remembers another batch size, a
baton that nobody hands on, a thread that waits for ever, half a gradient.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from tests.busy import busy
from tests.chance import Step, as_written_once, steps
from tests.faults import MICRO_BATCH, Fails, Faults, Items, N, alone, loss_of
from tests.oracle import copy_of, error_of, same, snapshot, state_of, tolerance, undivided
from torch import Tensor

import anybatch
from anybatch import Engine, LazyBatch

State = dict[str, Tensor]


def made(step: Step) -> State:
    """Make a step, and return what it leaves."""
    return state_of(step.model, step.make())


def wrong(step: Step) -> dict[str, float]:
    """Make a step, and return what breaks Law 1."""
    before = as_written_once(step.model, plain=False)
    got = made(step)
    assert step.engine.last is not None
    plain = as_written_once(before, plain=step.engine.last.micro_batches > 1)
    want = undivided(plain, step.loss, step.x, step.y)
    order = torch.randperm(len(step.x), generator=torch.Generator().manual_seed(step.number))
    noise = error_of(undivided(plain, step.loss, step.x[order], step.y[order]), want)
    errors, bound = error_of(got, want), tolerance(noise)
    return {name: error for name, error in errors.items() if not error <= bound}


def test_of_many_random_steps_none_is_wrong(counted: Callable[..., int]) -> None:
    """Five steps of an engine, each of another batch size; then another model, loss and split."""
    count, divided = counted(2000, 80), 0
    for step in steps(count):
        found = wrong(step)
        assert not found, f"step {step.number}, {step.said}: {found}"
        assert step.engine.last is not None
        divided += step.engine.last.micro_batches > 1
    assert divided > count // 2


def test_the_same_steps_again_give_the_same_bits(counted: Callable[..., int]) -> None:
    """Models with dropout too: every lane has its own dice."""
    count = counted(1000, 100)
    once = [(made(step), torch.get_rng_state()) for step in steps(count, drops=True)]
    for step, (state, rng) in zip(steps(count, drops=True), once, strict=True):
        assert same(made(step), state), f"step {step.number}, {step.said}"
        assert torch.equal(torch.get_rng_state(), rng)


class BoomError(Exception):
    pass


class Setting:
    """A model with gradients that are there already, and steps on it that can fail."""

    def __init__(self, variant: str, *, warm: bool = False) -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        self.faults = faults = Faults()
        self.model = Fails(faults).double()
        self.x, self.y = torch.randn(N, 5, dtype=torch.float64), torch.randint(3, (N,))
        self.loss = loss_of(faults, coupled=variant == "coupled")
        self.engine = Engine(self.model, self.loss, micro_batch=MICRO_BATCH)
        items = Items(faults, self.x, self.y)
        self.inputs: Any = LazyBatch(items) if variant == "lazy" else self.x
        self.targets = None if variant == "lazy" else self.y
        for p in list(self.model.parameters())[1:]:
            p.grad = torch.ones_like(p)
        if warm:
            self.step()

    def step(self) -> Tensor:
        return self.engine.backward(self.inputs, self.targets, observe=self.observe)

    def observe(self, out: Any, y: Any) -> None:
        self.faults.at("observe")

    def state(self) -> dict[str, Any]:
        """Everything that a failed step leaves as it was (Law 5)."""
        rng_state = {"python": random.getstate(), "numpy": np.random.get_state()[1].tolist()}  # type: ignore[index]
        return snapshot(self.model) | rng_state | {"threads": busy()}

    def assert_the_next_step_is_exact(self) -> None:
        self.faults.disarm()
        plain = copy_of(self.model)
        plain.again = False
        want = undivided(plain, self.loss, self.x, self.y)
        noise = error_of(undivided(plain, self.loss, self.x.flip(0), self.y.flip(0)), want)
        errors = error_of(state_of(self.model, self.step()), want)
        assert max(errors.values()) <= tolerance(noise), errors


@cache
def calls_of(variant: str, *, warm: bool) -> dict[str, int]:
    """Return how often a step comes by each place: an engine's first one, or a later one."""
    setting = Setting(variant, warm=warm)
    setting.faults.calls.clear()
    setting.step()
    return dict(setting.faults.calls)


def files_in(folder: Path) -> list[Path]:
    """Return the files of the package in a folder, those too that are open and have no name."""
    found = list(folder.iterdir())
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(descriptor.readlink())
    return [path for path in found if path.is_relative_to(folder) and "anybatch-" in path.name]


@pytest.fixture
def spill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder where lanes keep what has left the device."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_step_has_a_file_while_it_runs_and_none_afterwards(spill: Path) -> None:
    setting, observed = Setting("known"), []
    inner = setting.loss

    def loss(out: Tensor, y: Tensor) -> Tensor:
        observed.append(len(files_in(spill)))
        found: Tensor = inner(out, y)
        return found

    Engine(setting.model, loss, micro_batch=MICRO_BATCH).backward(setting.x, setting.y)
    assert max(observed) == 1
    assert files_in(spill) == []


FORWARD = ["forward before", "forward between", "computed once", "forward behind", "pack", "loss"]
BACKWARD = ["backward before", "backward between", "computed again", "unpack"]
HOOKS = ["hook of a module", "hook of a parameter", "observe"]
PLACES = {
    "known": [*FORWARD, *BACKWARD, *HOOKS],
    "coupled": [*FORWARD, *BACKWARD, *HOOKS],
    "lazy": ["data", *FORWARD, *BACKWARD, *HOOKS],
}
ERRORS = [BoomError, KeyboardInterrupt, torch.OutOfMemoryError]


def test_every_place_is_passed_once_a_lane_or_more() -> None:
    for variant, places in PLACES.items():
        for warm in (False, True):
            calls, lanes = calls_of(variant, warm=warm), -(-N // MICRO_BATCH)
            least = {place: calls.get(place, 0) for place in places}
            once = ["hook of a parameter", *(["loss"] if variant != "known" else [])]
            assert all(n >= lanes for place, n in least.items() if place not in once), least
            assert least["loss"] >= 1
            assert least["hook of a parameter"] == 1


@pytest.mark.large
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("variant", "place"), [(k, p) for k, found in PLACES.items() for p in found]
)
def test_what_is_raised_anywhere_leaves_nothing_behind(
    variant: str, place: str, error: type[BaseException], spill: Path, counted: Callable[[int], int]
) -> None:
    """At the first, the middle and the last time, in an engine's first step and in a later one."""
    every = [(warm, part) for warm in (False, True) for part in (0.0, 0.5, 1.0)]
    rng = random.Random(f"{variant} {place} {error}")
    for warm, part in rng.sample(every, counted(len(every))):
        setting = Setting(variant, warm=warm)
        calls = calls_of(variant, warm=warm)[place]
        setting.faults.arm(place, round(part * (calls - 1)), error("on purpose"))
        before = setting.state()
        raised: BaseException | None = None
        try:
            setting.step()
        except error as one:
            raised = one
        if raised is None:  # in a forward that is only followed: a doubt, and no step of a person's
            assert not warm
            assert issubclass(error, Exception)
            assert setting.engine.plan is not None
            assert not setting.engine.plan.exact
            continue
        assert "on purpose" in str(raised)
        after = setting.state()
        assert same(before, after), [k for k in before if not same(before[k], after[k])]
        assert files_in(spill) == []
        setting.assert_the_next_step_is_exact()


SOURCES = str(Path(anybatch.__file__).parent), str(Path(__file__).parents[1])


class Interrupt:
    """Sends this process a real SIGINT at the count-th line that any of its threads runs.

    A signal to a process is taken by the main thread, which waits for the lanes: it wakes up while
    the one that has the baton runs on, so it lands between lines and in the middle of kernels.
    """

    def __init__(self, count: int) -> None:
        self.count, self.lines, self.sent = count, 0, False
        self._next = itertools.count(1)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        if event == "line":
            self.lines = next(self._next)
            if self.lines == self.count:
                self.sent = True
                os.kill(os.getpid(), signal.SIGINT)
        return self


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """The signals that have come, each raised as Python does."""
    found: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        found.append(number)
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, handle)
    yield found
    signal.signal(signal.SIGINT, before)


def interrupted(step: Callable[[], Any], tracer: Interrupt, signals: list[int]) -> bool:
    """Run a step, and say whether the signal came before it was over."""
    signals.clear()
    over = False
    threading.settrace(tracer)
    sys.settrace(tracer)
    try:
        alone(step)
        over = True
        while tracer.sent and not signals:
            pass  # it is on its way
    except KeyboardInterrupt:
        return not over
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return False


@pytest.mark.product
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("variant", ["known", "coupled"])
def test_ctrl_c_at_a_random_moment_of_any_lane(
    variant: str, warm: bool, signals: list[int], spill: Path, counted: Callable[[int], int]
) -> None:
    """The step was whole or not at all, and the engine goes on as if nothing had been."""
    tracer, setting = Interrupt(10**9), Setting(variant, warm=warm)
    interrupted(setting.step, tracer, signals)
    done, rng = setting.state(), random.Random(f"{variant} {warm}")
    undone, count = 0, counted(80)
    for _ in range(count):
        setting = Setting(variant, warm=warm)
        before, place = setting.state(), rng.randrange(1, tracer.lines)
        came = interrupted(setting.step, Interrupt(place), signals)
        now = setting.state()
        was, full = same(_values(before), _values(now)), same(_values(done), _values(now))
        assert was or full, f"half a step at line {place} of {tracer.lines}"
        assert came or full, f"the signal at line {place} was lost"
        assert now["threads"] == before["threads"]
        assert files_in(spill) == []
        undone += was
        setting.assert_the_next_step_is_exact()
    assert undone > 0.8 * count


def _values(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not name.endswith("ids")}
