"""What is computed again is what it was: traces are run on symbols, before and after rewriting.

A value is the name of the function that made it and the values it read, so two values are equal
only if the same functions made them of the same things. What a function updates in place beside its
result (running statistics) does not go into the result.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from benchmarks.simulators.recompute import cheap, cheap_recipes
from benchmarks.simulators.recompute_policy import plan_with_recomputation
from benchmarks.simulators.rewrite import Rewriter, rewrite
from benchmarks.simulators.sublinear import sublinear
from tests.unit.offloading.traces import anything

from anybatch.core.plan_sections import Link
from anybatch.errors import BudgetError
from anybatch.offloading.policy import plan
from anybatch.offloading.schedule import Function, Trace, Variable, simulate


class Net:
    """Forward and backward of conv - BatchNorm - ReLU in place, with joins or sums."""

    def __init__(self, layers: int, rng: Random, *, joins: bool = False) -> None:
        self.variables: list[Variable] = []
        self.functions: list[Function] = []
        self.rng = rng
        self.backwards: list[tuple[str, tuple[int, ...], int, int]] = []
        states = [self.new("x", before=True)]
        for k in range(layers):
            states.append(self.layer(k, self.joined(k, states) if joins else states[-1]))
            if not joins and k % 2 and rng.random() < 0.7:
                states.append(self.add(k, states[-1], states[-2]))
        self.run("loss", (states[-1],), backward=True)
        gradients = {states[-1]: len(self.variables) - 1}
        for name, reads, made, source in reversed(self.backwards):
            gradient = gradients.get(made, len(self.variables) - 1)
            gradients[source] = self.run(name, (gradient, *reads), backward=True)

    def new(self, name: str, *, before: bool = False, after: bool = False, size: int = 0) -> int:
        self.variables.append(Variable(name, size or self.rng.randint(2, 20), before, after))
        return len(self.variables) - 1

    def run(
        self,
        name: str,
        reads: tuple[int, ...],
        flops: float = 0.0,
        *,
        backward: bool = False,
        size: int = 0,
    ) -> int:
        made = self.new(f"{name} result", size=size)
        seconds = 1.0 if flops else 0.1
        one = Function(name, tuple(dict.fromkeys(reads)), (made,), (), flops, 0, seconds, backward)
        self.functions.append(one)
        return made

    def layer(self, k: int, x: int) -> int:
        weight = self.new(f"w{k}", before=True, after=True)
        conv = self.run(f"conv{k}", (x, weight), 1.0)
        moving = self.new(f"mean{k}", before=True, after=True, size=1)
        norm = self.run(f"norm{k}", (conv, moving), size=self.variables[conv].size)
        last = self.functions[-1]
        self.functions[-1] = replace(last, writes=(moving,))
        self.functions.append(Function(f"relu{k}", (norm,), (), (norm,), seconds=0.1))
        self.backwards.append((f"conv{k} back", (x, weight), conv, x))
        self.backwards.append((f"norm{k} back", (conv,), norm, conv))
        self.backwards.append((f"relu{k} back", (norm,), norm, norm))
        return norm

    def joined(self, k: int, states: list[int]) -> int:
        size = sum(self.variables[v].size for v in states)
        return self.run(f"cat{k}", tuple(states), size=size)

    def add(self, k: int, a: int, b: int) -> int:
        total = self.run(f"add{k}", (a, b))
        made = self.run(f"relu_of_sum{k}", (total,), size=self.variables[total].size)
        self.backwards.append((f"sum{k} back", (made,), made, a))
        return made

    def trace(self) -> Trace:
        return Trace(tuple(self.variables), tuple(self.functions))


def values(trace: Trace) -> list[tuple[str, tuple[int, ...]]]:
    """Name of each function that is not run again, and the values it read, in order."""
    at: dict[int, int] = {v: hash(("before", v)) for v in trace.before}
    found = []
    for function in trace.functions:
        inputs = tuple(at[v] for v in function.reads)
        pure = tuple(at[v] for v in function.reads if v not in function.writes)
        if not function.again:
            found.append((function.name, inputs))
        for v in function.writes:
            at[v] = hash((function.name, "writes", at[v], pure))
        for v in function.makes:
            at[v] = hash((function.name, "makes", trace.size(v), pure))
    return found


def nets() -> list[Trace]:
    return [Net(Random(s).randint(1, 12), Random(s), joins=s % 2 == 1).trace() for s in range(24)]


def test_what_is_computed_again_has_the_same_value_and_statistics_move_once() -> None:
    dropped = 0
    for trace in nets():
        for share in (0.3, 1.0):
            again = cheap(trace, share)
            assert values(again) == values(trace)
            dropped += sum(function.again for function in again.functions)
    assert dropped > 50


def any_step(seed: int) -> Trace:
    """A step of functions that read, write and make at random, some heavy, some with dice."""
    rng = Random(seed)
    trace = anything(rng, rng.randint(1, 16))
    first_backward = rng.randint(0, len(trace.functions))
    row = [
        replace(
            function,
            name=f"f{i}",
            backward=i >= first_backward,
            flops=float(rng.random() < 0.3),
            draws=rng.random() < 0.1,
        )
        for i, function in enumerate(trace.functions)
    ]
    return Trace(trace.variables, tuple(row))


def test_steps_of_any_sort_keep_their_values() -> None:
    """Seeds by name have failed: a buffer written later, a result made again on the way to one."""
    again = 0
    for seed in (*range(60), 63, 75, 84, 1143, 1457, 1491):
        trace = any_step(seed)
        for step in (cheap(trace), cheap(trace, 0.5), sublinear(trace, 2), sublinear(trace, 6)):
            assert values(step) == values(trace), seed
            again += sum(function.again for function in step.functions)
    assert again > 50


def test_stretches_computed_again_have_the_same_values() -> None:
    counts = set()
    for trace in nets():
        for stretches in (1, 2, 3, 5, 50):
            assert values(sublinear(trace, stretches, 0.5)) == values(trace)
            again = sublinear(trace, stretches)
            assert values(again) == values(trace)
            counts.add(sum(function.again for function in again.functions))
    assert 0 in counts
    assert len(counts) > 5


def test_nothing_heavy_or_random_is_run_again_as_cheap() -> None:
    for trace in nets():
        for function in cheap(trace).functions:
            assert not (function.again and function.flops)
    trace = Net(4, Random(0)).trace()
    dropout = tuple(replace(f, draws=f.name.startswith("relu")) for f in trace.functions)
    assert cheap_recipes(Trace(trace.variables, dropout)) == {}


def test_it_keeps_less() -> None:
    chain, joined = (Net(12, Random(3), joins=joins).trace() for joins in (False, True))
    assert cheap(chain).peak < 0.8 * chain.peak
    assert cheap(joined).peak < 0.5 * joined.peak
    assert sublinear(chain, 4).peak < 0.8 * chain.peak


def test_a_share_of_nothing_changes_nothing() -> None:
    trace = Net(6, Random(3)).trace()
    assert cheap(trace, 0).functions == sublinear(trace, 1).functions == trace.functions


def test_a_rewritten_trace_is_planned_like_any_other() -> None:
    for trace in nets():
        for again in (cheap(trace), sublinear(trace, 3)):
            link = Link(3, 3)
            budget = (again.floor + again.peak) // 2
            found = simulate(again, plan(again, budget, link), link)
            assert found.peak <= budget


def test_with_recomputation_a_step_is_never_slower() -> None:
    faster = 0
    for trace in nets()[:4]:
        budget, link = (trace.floor + trace.peak) // 2, Link(3, 3)
        step, schedule = plan_with_recomputation(trace, budget, link)
        ours = simulate(trace, plan(trace, budget, link), link).seconds
        again = simulate(step, schedule, link)
        assert again.peak <= budget
        assert again.seconds <= ours
        faster += again.seconds < ours
    assert faster > 1
    with pytest.raises(BudgetError, match="even with everything else offloaded"):
        plan_with_recomputation(trace, 1, link)


def test_a_source_that_was_written_to_since_is_no_source() -> None:
    variables = tuple(Variable(name, 4) for name in "abcg")
    row = (
        Function("make a", (), (0,), flops=1.0),
        Function("double", (0,), (1,)),
        Function("read b", (1,), (2,), flops=1.0),
        Function("change a", (0,), (), (0,)),
        Function("back", (0, 1, 2), (3,), backward=True),
    )
    assert cheap_recipes(Trace(variables, row)) == {}
    unchanged = Trace(variables, (*row[:3], row[4]))
    assert {v: set(found.functions) for v, found in cheap_recipes(unchanged).items()} == {1: {1}}


def test_what_a_row_of_joins_begins_with_is_retained_and_not_made_for_each() -> None:
    """A dense block behind a transition: every join reads what was pooled, and three states."""
    sizes = {"x": 40, "pooled": 10, "a": 4, "b": 4, "c": 4, "j1": 14, "j2": 18, "j3": 22, "g": 1}
    names = list(sizes)
    v = names.index
    variables = tuple(Variable(name, size, name == "x") for name, size in sizes.items())
    row = [Function("pool", (v("x"),), (v("pooled"),))]
    parts = [v("pooled")]
    for state, join in (("a", "j1"), ("b", "j2"), ("c", "j3")):
        row.append(Function(f"conv {state}", tuple(parts), (v(state),), flops=1.0))
        parts.append(v(state))
        row.append(Function(f"cat {join}", tuple(parts), (v(join),)))
    back = (v("j1"), v("j2"), v("j3"))
    row.append(Function("back", back, (v("g"),), backward=True))
    trace = Trace(variables, tuple(row))
    found = cheap_recipes(trace)
    assert set(found) == set(back)
    assert all(len(found[j].functions) == 1 for j in back)
    assert {name for f in cheap(trace).functions if f.again for name in [f.name]} == {
        "cat j1",
        "cat j2",
        "cat j3",
    }


def test_what_needs_as_much_retained_in_its_place_is_not_made_again() -> None:
    """A ReLU of a sum whose parts are gone: to keep the sum instead frees nothing."""
    names = ("a", "b", "sum", "relu", "g")
    variables = tuple(Variable(name, 4) for name in names)
    row = (
        Function("conv", (), (0,), flops=1.0),
        Function("conv", (0,), (1,), flops=1.0),
        Function("add", (0, 1), (2,)),
        Function("relu", (2,), (3,)),
        Function("change", (0, 1), (), (0,)),
        Function("back", (3,), (4,), backward=True),
    )
    assert cheap_recipes(Trace(variables, row)) == {}


def test_a_share_takes_first_what_costs_least_a_byte() -> None:
    variables = tuple(Variable(name, 4) for name in ("a", "dear", "near", "g"))
    row = (
        Function("conv", (), (0,), flops=1.0),
        Function("norm", (0,), (1,), touched=16),
        Function("cat", (0,), (2,), touched=8),
        Function("back", (0, 1, 2), (3,), backward=True),
    )
    again = [f.name for f in cheap(Trace(variables, row), 0.5).functions if f.again]
    assert again == ["cat"]


def test_a_rewriter_calls_for_each_variable_once() -> None:
    trace = Net(5, Random(1)).trace()
    recipes = cheap_recipes(trace)
    requested: list[int] = []

    def remake(rewriter: Rewriter, v: int) -> None:
        requested.append(v)
        rewriter.now[v] = v

    assert rewrite(trace, recipes, remake).functions == trace.functions
    assert sorted(requested) == sorted(recipes)
