"""Programs drawn from a seed: exact where samples are apart, never shown and wrong elsewhere.

The truth is the undivided batch in float64. Whether samples meet is checked by force: where they do
not, the gradients of single rows add up to that of the batch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from tests.oracle import assert_exact, state_of, undivided
from tests.unit.execution.proof.programs import DOUBTED, HARD, Program, Stage, drawn, names, plain
from torch import Tensor
from torch.nn import functional as F

from anybatch import Engine
from anybatch.errors import NotExactError
from anybatch.tools.exactness import error_of

GROUPS, EACH = 20, 40
ROUNDING = 1e-9
"""What undivided runs differ by, where samples do not meet."""

Rows = tuple[tuple[Tensor, Tensor], Tensor]
State = dict[str, Tensor]


def truth(program: Program, rows: Rows) -> State:
    return undivided(program, F.cross_entropy, *rows)


def noise(program: Program, rows: Rows, want: State) -> dict[str, float]:
    """Return what a permuted batch is off; samples that meet are no noise."""
    (x, ids), y = rows
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    found = error_of(truth(program, ((x[order], ids[order]), y[order])), want)
    return {name: error for name, error in found.items() if error <= ROUNDING}


def by_rows(program: Program, rows: Rows) -> State:
    """Return the sum of what single rows give."""
    (x, ids), y = rows
    n = len(x)
    total: State = {}
    for at in range(n):
        one = ((x[at : at + 1], ids[at : at + 1]), y[at : at + 1])
        for name, value in undivided(program, lambda o, t: F.cross_entropy(o, t) / n, *one).items():
            total[name] = total[name] + value if name in total else value
    return {name: value for name, value in total.items() if not name.endswith("(buffer)")}


def meets(program: Program, rows: Rows) -> bool:
    """Say whether samples that meet change a gradient."""
    found = by_rows(program, rows)
    want = truth(program, rows)
    errors = error_of(found, {name: want[name] for name in found})
    return max(errors.values()) > ROUNDING


def outcome(program: Program, seed: int) -> str:
    """Return what an engine says of two batches; assert that it is not wrong where it is shown."""
    rng = random.Random(seed)
    engine = Engine(program, F.cross_entropy, micro_batch=rng.choice((1, 2, 3, 4)))
    states = []
    for step in range(2):
        rows = program.rows(rng.randint(5, 9), 2 * seed + step)
        want = truth(program, rows)
        program.zero_grad()
        try:
            loss = engine.backward(*rows)
        except NotExactError:
            return "refused"
        assert engine.plan is not None
        states.append(engine.plan.exact.state)
        got, described = state_of(program, loss), f"seed {seed}: {list(program.stages)}"
        if states[-1] == "shown" or not any(stage.meets for stage in program.stages):
            program.zero_grad()
            try:
                assert_exact(got, want, noise(program, rows, want))
            except AssertionError as wrong:
                raise AssertionError(f"{described}: {engine.plan.exact}") from wrong
    return states[-1]


@pytest.mark.parametrize("meet", [False, True])
def test_each_operation_brings_samples_together_just_where_it_is_said_to(meet: bool) -> None:
    every = names(meets=meet)
    assert len(every) >= 80
    programs = {name: plain(name, meets=meet) for name in every}
    assert [n for n, one in programs.items() if meets(one, one.rows(6, 1)) != meet] == []


def test_most_couplings_reach_a_gradient_where_they_are_drawn() -> None:
    programs = [drawn(seed, meets=True) for seed in range(60)]
    found = Counter(meets(one, one.rows(6, seed)) for seed, one in enumerate(programs))
    assert found[True] >= 50


@pytest.mark.large
@pytest.mark.parametrize("group", range(GROUPS))
def test_a_program_of_separate_samples_is_exact(group: int, counted: Callable[[int], int]) -> None:
    seeds = [1000 * group + at for at in range(counted(EACH))]
    for seed in seeds:
        program = drawn(seed, meets=False)
        assert not meets(program, program.rows(6, seed)), seed
        found = outcome(program, seed)
        doubted = any(stage.operation in DOUBTED for stage in program.stages)
        assert found == "shown" or (doubted and found == "not shown"), (seed, program.stages)


@pytest.mark.large
@pytest.mark.parametrize("group", range(GROUPS))
def test_a_coupled_program_is_never_shown_and_wrong(
    group: int, counted: Callable[[int], int]
) -> None:
    for seed in [1000 * group + at for at in range(counted(EACH))]:
        outcome(drawn(seed, meets=True), seed)


@pytest.mark.parametrize("name", sorted(HARD))
def test_a_coupling_that_no_mask_shows_is_not_shown(name: str) -> None:
    program = plain(name, meets=True)
    (stage,) = program.stages
    assert isinstance(stage, Stage)
    stage.way = "gated" if name.startswith(("a constant", "a triangle")) else "replaced"
    outcome(program, 1)


@pytest.mark.product
@pytest.mark.parametrize("name", ["mean", "softmax", "a hook that centres"])
@pytest.mark.parametrize("tokens", [4, 8, 12])
def test_lines_of_which_few_rows_hold_complete_ones_are_not_shown(name: str, tokens: int) -> None:
    program = plain(name, meets=True, tokens=tokens)
    (stage,) = program.stages
    assert isinstance(stage, Stage)
    stage.layout, stage.dim = "regrouped", 1
    stage.way = "replaced" if "hook" in name else "gated"
    outcome(program, 1)


def test_windows_that_overlap_next_to_a_backward_of_its_own_are_exact() -> None:
    assert outcome(plain("unfold", "a function that saves", meets=False), 1) == "shown"
