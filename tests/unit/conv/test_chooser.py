from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernels import fought_as, measured_as
from tests.unit.conv.problems import KERNELS, problem

from anybatch.conv.chooser import Chooser, Costs, Problem, certain
from anybatch.reports import Configuration, Convolutions, KernelPart


def test_a_duel_is_fought_once_and_decides_a_small_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fought: list[str] = []

    def made(one: Problem, size: int, name: str) -> tuple[float, int, float]:
        return (0.8 if name == "fft" else 1.0) * size / 100, 100, 0.0

    def fight(one: Problem, configuration: Configuration) -> float:
        fought.append(str(configuration))
        return 1.1 if one.kernel == "data" else 0.8

    measured_as(monkeypatch, made, held=True)
    fought_as(monkeypatch, fight)
    path = tmp_path / "costs.sqlite"
    for _ in range(2):
        found = Convolutions(1 << 20, "powerOfTwo")
        chooser = Chooser(found, Costs(path), 60.0)
        keys = [(problem(kernel, 1, "padded"), 4) for kernel in KERNELS]
        chooser.choose(keys)
        chosen = [str(found.chosen[key].configurations[0])[:4] for key in keys]
        assert chosen == ["fft@", "nati", "fft@"]
    assert len(fought) == 3


def test_a_duel_for_which_there_is_no_time_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    fought: list[Problem] = []
    fought_as(monkeypatch, lambda one, _: fought.append(one) or 0.1)
    costs, one = Costs(), problem("forward", 1, "plain")
    own, best = (
        Configuration((KernelPart(2, name, seconds, 1),))
        for name, seconds in (("native", 1.0), ("fft", 0.8))
    )
    assert certain(costs, one, [own, best], 8.9) == [own]
    assert not fought
    assert certain(costs, one, [own, best], 9.1) == [own, best]
    assert certain(costs, one, [own, best], 0.0) == [own, best]  # it was fought already
    assert len(fought) == 1
