"""A configuration holds no more than its workspace when it runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.peaks import metered
from tests.unit.conv.problems import (
    KERNELS,
    bound,
    distance,
    divided,
    drawn,
    operands,
    problem,
    wanted,
)

from anybatch.conv.algorithms import Fourier, native, run
from anybatch.reports import Configuration, KernelPart


@pytest.mark.large(few=1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_configuration_keeps_to_its_workspace_and_is_right(
    dtype: str, counted: Callable[[int], int]
) -> None:
    rng = random.Random(7)
    for _ in range(counted(200)):
        one, size = drawn(rng, dtype), rng.randint(1, 5)
        if rng.random() < 0.3:  # large enough for tiles
            one = replace(one, image=tuple(h + 60 // len(one.image) ** 2 for h in one.image))
        a, b = operands(one, size)
        parts, best = divided(one, size, rng.choice(["all", "powerOfTwo"]))
        true = wanted(one, a, b)
        own, scale = native(one, a, b), float(a.double().norm() * b.double().norm())
        mixed = tuple(rng.choice([p for p in parts if p.size == 1]) for _ in range(size))
        chosen = [*best, Configuration((rng.choice(parts[:1]),))]
        for configuration in (*chosen, *([Configuration(mixed)] if size > 1 else [])):
            with metered({"operands": [a, b]}) as meter:
                found = run(one, configuration, (a, b), own.stride())
            its = distance(own, true, scale)
            assert distance(found, true, scale) <= bound(one, its), (one, configuration)
            undivided = configuration.parts[0].workspace == 0  # torch's own, which is not run here
            more = meter.peak - a.nbytes - b.nbytes - found.nbytes
            assert undivided or more <= configuration.workspace, (one, configuration)


def noted(done: list[str], name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, which notes its name."""

    def call(*arguments: Any) -> Any:
        done.append(name)
        return real(*arguments)

    return call


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_parts_have_in_common_is_done_once(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, done = problem(kernel, 2, "grouped"), list[str]()
    for name in ("shared", "finish"):
        monkeypatch.setattr(Fourier, name, noted(done, name, getattr(Fourier, name)))
    a, b = operands(one, 5)
    own = native(one, a, b)
    parts = tuple(KernelPart(*part, 1.0, 0) for part in ((2, "fft"), (2, "fft"), (1, "fft")))
    found = run(one, Configuration(parts), (a, b), own.stride())
    assert distance(found, wanted(one, a, b)) <= 1e-6
    assert done == ["finish" if kernel == "filter" else "shared"]
