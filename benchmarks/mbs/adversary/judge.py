"""The verdict on a case: three steps of an engine, each beside the undivided batch in float64.

All runs follow the parameters of the undivided run in float64, rounded to the dtype of the case
after each step, so that a step is judged alone. In float64 the bound is Law 1's; undivided runs
with permuted rows or a scaled loss that differ by more than rounding show a coupling, and are no
noise. In another dtype a step may be as far from the truth as ten times the undivided batch in that
dtype is, or the same batch with permuted rows or a scaled loss where that shows no coupling.
"""

import re
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anybatch import Engine
from anybatch.errors import AnybatchError, BudgetError
from anybatch.tools.exactness import FLOOR, NOISE_FACTOR, error_of, tolerance
from benchmarks.mbs.adversary.cases import Case
from benchmarks.mbs.adversary.forms import FORMS
from benchmarks.mbs.adversary.net import STEPS, Problem, build

OUTCOMES = ("exact", "refused", "not claimed", "silently wrong", "crash", "no truth")
RATE, TRIES = 0.2, 4
ROUNDING = 1e-9
"""Undivided runs in float64 that differ by more differ by a coupling."""

Tensors = dict[str, Tensor]
Step = Callable[[Problem, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Verdict:
    """What a case has come to.

    Attributes:
        outcome: one of `OUTCOMES`.
        step: the first step that was not exact, from 0; the last one where all were.
        error: the worst of that step, None where there is none.
        bound: what was allowed there.
        message: of the error that was raised, its first 300 letters.
        named: the message names a module of the network.
        by_hand: whether a loop by hand over micro-batches keeps the bound; None where it is no
            measure (a BatchNorm or a coupled loss stands beside the coupling).
        seconds: of the engine's steps.
    """

    outcome: str
    step: int = 0
    error: float | None = None
    bound: float | None = None
    message: str = ""
    named: bool = False
    by_hand: bool | None = None
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Run:
    """The steps of one network: from a seed, following parameters or leading."""

    def __init__(
        self, case: Case, step: Step, path: list[Tensors] | None = None, *, wide: bool = False
    ) -> None:
        self.case, self.step, self.path = case, step, path
        self.problem = build(case, wide=wide)
        self.led: list[Tensors] = []

    def state(self, index: int) -> Tensors:
        """Loss, gradients and buffers after a step, which are called in order."""
        problem, net = self.problem, self.problem.net
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                if self.path is not None:
                    parameter.copy_(self.path[index][name])
        self.led.append({name: p.detach().clone() for name, p in net.named_parameters()})
        net.zero_grad(set_to_none=True)
        problem.begin(index)
        torch.manual_seed(1000 + 10 * self.case.seed + index)
        x, y = problem.batches[index]
        loss = self.step(problem, x.clone(memory_format=torch.preserve_format), y.clone())
        found = {"loss": loss.detach().clone()}
        for name, p in net.named_parameters():
            if p.grad is not None:
                found[f"{name}.grad"] = p.grad.detach().clone()
        return found | {f"{name} (buffer)": b.detach().clone() for name, b in net.named_buffers()}

    def lead(self, dtype: torch.dtype) -> None:
        """A step of plain descent, to parameters that a dtype holds."""
        with torch.no_grad():
            for p in self.problem.net.parameters():
                if p.grad is not None:
                    p.copy_((p - RATE * p.grad).to(dtype))


def undivided(problem: Problem, x: Tensor, y: Tensor) -> Tensor:
    loss = problem.objective(problem.net(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def permuted(problem: Problem, x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return undivided(problem, x[order], y[order])


def scaled(problem: Problem, x: Tensor, y: Tensor) -> Tensor:
    loss = problem.objective(problem.net(x), y)
    loss.backward(torch.full_like(loss, 3.0))  # type: ignore[no-untyped-call]
    for p in problem.net.parameters():
        if p.grad is not None:
            p.grad.div_(3.0)
    return loss


def by_hand(problem: Problem, x: Tensor, y: Tensor) -> Tensor:
    """The usual loop: losses weighted by samples."""
    total, size = x.new_zeros(()), problem.net.case.micro_batch
    for at in range(0, len(x), size):
        part, targets = x[at : at + size], y[at : at + size]
        loss = problem.objective(problem.net(part), targets) * (len(part) / len(x))
        loss.backward()  # type: ignore[no-untyped-call]
        total = total + loss.detach()
    return total


class Truth:
    """The undivided batch in float64, its noise, and the bound of every step."""

    def __init__(self, case: Case) -> None:
        self.case, dtype = case, getattr(torch, case.dtype)
        leader = Run(case, undivided, wide=True)
        with torch.no_grad():
            for p in leader.problem.net.parameters():
                p.copy_(p.to(dtype))
        self.states = []
        for index in range(STEPS):
            self.states.append(leader.state(index))
            leader.lead(dtype)
        self.path = leader.led
        self.bounds = self._noise() if case.dtype == "float64" else self._distance()

    def finite(self) -> bool:
        return all(bool(t.isfinite().all()) for state in self.states for t in state.values())

    def _noise(self) -> list[float]:
        worst = [0.0] * STEPS
        for step in (permuted, scaled):
            run = Run(self.case, step, self.path)
            for index in range(STEPS):
                noise = max(error_of(run.state(index), self.states[index]).values())
                if noise > ROUNDING:
                    break
                worst[index] = max(worst[index], noise)
        return [tolerance({"undivided": noise}) for noise in worst]

    def _distance(self) -> list[float]:
        """Ten times what undivided batches in the dtype are off, and no less than its rounding.

        Where the true gradient is 0, as a bias's before BatchNorm, one run may be right by luck.
        """
        steps = [undivided, *(step for step in (permuted, scaled) if self._changes_nothing(step))]
        least = max(FLOOR, torch.finfo(getattr(torch, self.case.dtype)).eps)
        every = [self._errors(Run(self.case, step, self.path)) for step in steps]
        return [NOISE_FACTOR * max(least, *one) for one in zip(*every, strict=True)]

    def _changes_nothing(self, step: Step) -> bool:
        """Whether another undivided step is the same one but for rounding, in float64."""
        return max(self._errors(Run(self.case, step, self.path, wide=True))) <= ROUNDING

    def _errors(self, run: Run) -> list[float]:
        return [max(error_of(run.state(i), self.states[i]).values()) for i in range(STEPS)]


def keeps_by_hand(case: Case, truth: Truth) -> bool | None:
    """Whether the loop by hand is right, so that nothing couples."""
    if case.mechanism in ("two-pass", "lockstep"):
        return None
    run = Run(case, by_hand, truth.path)
    try:
        found = [run.state(index) for index in range(STEPS)]
    except Exception:
        return False
    errors = [max(error_of(a, b).values()) for a, b in zip(found, truth.states, strict=True)]
    return all(error <= bound for error, bound in zip(errors, truth.bounds, strict=True))


class Subject:
    """An engine on a problem, made at its first step."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.engine: Engine | None = None
        self.options: dict[str, Any] = {"micro_batch": case.micro_batch}
        if FORMS[case.coupling].draws:
            self.options["rng"] = "batch"

    def __call__(self, problem: Problem, x: Tensor, y: Tensor) -> Tensor:
        if self.engine is None:
            if self.case.mechanism == "budget":
                with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                    self._budget(x, y)
            self.engine = Engine(problem.net, problem.objective, **self.options)
        return self.engine.backward(x, y)

    def _budget(self, x: Tensor, y: Tensor) -> None:
        """A quarter more than the bytes that a smaller budget says are needed."""
        options = {key: value for key, value in self.options.items() if key != "micro_batch"}
        nbytes = 1
        for _ in range(TRIES):
            other = build(self.case)
            other.begin(0)
            try:
                Engine(other.net, other.objective, memory=nbytes, **options).backward(x, y)
                break
            except BudgetError as error:
                nbytes = int(1.25 * error.needed)
        build(self.case)  # what lies outside of networks is as it was
        self.options = options | {"memory": nbytes}


def judge(case: Case) -> Verdict:
    """Run a case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truth = Truth(case)
        if not truth.finite():
            return Verdict("no truth", message="the undivided batch gives NaN or infinity")
        hand = keeps_by_hand(case, truth)
        return replace(_judged(case, truth), by_hand=hand)


def _judged(case: Case, truth: Truth) -> Verdict:
    subject = Subject(case)
    run, start = Run(case, subject, truth.path), time.perf_counter()
    claimed, worst, index = True, 0.0, 0
    for index in range(STEPS):
        bound = truth.bounds[index]
        try:
            state = run.state(index)
        except Exception as error:
            outcome = "refused" if isinstance(error, AnybatchError) else "crash"
            text = f"{type(error).__name__}: {error}"
            named = _names(run.problem, text)
            seconds = time.perf_counter() - start
            return Verdict(outcome, index, None, bound, text[:300], named, seconds=seconds)
        assert subject.engine is not None
        assert subject.engine.plan is not None
        exact = bool(subject.engine.plan.exact)
        off = max(error_of(state, truth.states[index]).values())
        worst, claimed = max(worst, off), claimed and exact
        if not off <= bound and exact:
            seconds = time.perf_counter() - start
            return Verdict("silently wrong", index, off, bound, seconds=seconds)
    seconds = time.perf_counter() - start
    return Verdict("exact" if claimed else "not claimed", index, worst, bound, seconds=seconds)


def _names(problem: Problem, text: str) -> bool:
    """Whether a message holds the name of a module that has to do with the coupling."""
    names = [name for name, _ in problem.net.named_modules() if name.startswith("middle")]
    return any(re.search(rf"\b{re.escape(name)}\b", text) for name in names)
