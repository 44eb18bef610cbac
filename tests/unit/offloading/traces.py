"""Traces to plan: random ones, and networks whose backward needs what forward made."""

from __future__ import annotations

from random import Random

from anybatch.core.plan_sections import Link
from anybatch.offloading.course import Course, Recording, set_course
from anybatch.offloading.policy import plan
from anybatch.offloading.schedule import Function, Schedule, Simulation, Trace, Variable, simulate
from anybatch.offloading.unroll import of_course


def network(
    layers: int, rng: Random, *, skips: bool = True, weights: bool = True, equal: bool = False
) -> Trace:
    """Forward, backward and update of a chain of layers, with skips from some layers to later ones.

    Every backward function reads the gradient of its output and what its layer had read; it makes
    the gradient of its input and that of its weight.
    """
    variables: list[Variable] = []
    functions: list[Function] = []

    def new(name: str, **where: bool) -> int:
        variables.append(Variable(name, 8 if equal else rng.randint(2, 20), **where))
        return len(variables) - 1

    def seconds() -> float:
        return 1.0 if equal else rng.uniform(0.2, 2)

    layer_weights = [new(f"w{k}", before=True, after=True) for k in range(layers * weights)]
    outputs, reads = [new("x", before=True)], []
    for k in range(layers):
        read = [outputs[-1], *layer_weights[k : k + 1]]
        if skips and k > 1 and rng.random() < 0.5:
            read.append(rng.choice(outputs[:-1]))
        made = new(f"a{k}")
        reads.append(tuple(dict.fromkeys(read)))
        functions.append(Function(f"f{k}", reads[-1], (made,), (), 0, 0, seconds()))
        outputs.append(made)
    gradient = new("g")
    functions.append(Function("loss", (outputs[-1],), (gradient,), (), 0, 0, seconds()))
    sums = []
    for k in reversed(range(layers)):
        below = new(f"g{k}")
        made = (below, new(f"d{k}")) if weights else (below,)
        sums += made[1:]
        read = tuple(dict.fromkeys((gradient, *reads[k])))
        functions.append(Function(f"b{k}", read, made, (), 0, 0, 2 * seconds()))
        gradient = below
    for w, d in zip(reversed(layer_weights), sums, strict=True):
        functions.append(Function("update", (w, d), (), (w,), 0, 0, 0.1))
    return Trace(tuple(variables), tuple(functions))


def anything(rng: Random, functions: int = 12, most: int = 20) -> Trace:
    """Functions that read, write and make at random."""
    variables = [
        Variable(f"s{k}", rng.randint(1, most), before=True, after=rng.random() < 0.5)
        for k in range(rng.randint(1, 4))
    ]
    row: list[Function] = []
    for i in range(functions):
        there = range(len(variables))
        reads = tuple(rng.sample(there, rng.randint(1, min(3, len(variables)))))
        writes = tuple(v for v in reads if rng.random() < 0.2)
        count = len(variables)
        for k in range(rng.randint(0, 2)):
            one = Variable(f"v{i}_{k}", rng.randint(1, most), stays=rng.random() < 0.1)
            variables.append(one)
        makes = tuple(range(count, len(variables)))
        row.append(Function(f"f{i}", reads, makes, writes, 0, 0, rng.uniform(0, 2)))
    return Trace(tuple(variables), tuple(row))


def simulated(trace: Trace, schedule: Schedule, link: Link) -> Simulation:
    """Return what a schedule costs, by the simulation that all of them are held against."""
    return simulate(trace, schedule, link)


def planned(trace: Trace, budget: int, link: Link) -> Schedule:
    """Return the schedule of this package for a trace."""
    return plan(trace, budget, link)


def course_of(recording: Recording, memory: int, link: Link, more: int = 0) -> Course:
    """Return what is planned for a recorded step."""
    return set_course(recording, memory, link, more)


def peak_of(course: Course) -> int:
    """Return the most bytes of a planned step, counted storage by storage."""
    return of_course(course).peak
