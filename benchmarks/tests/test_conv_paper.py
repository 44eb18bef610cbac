"""The paper's tables: a network's own kernels, and choices that follow from their parts."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.ucudnn import device, models
from benchmarks.ucudnn.listen import RecordedKernel, listen
from benchmarks.ucudnn.models import LARGE, MODULES, NETWORKS, Network
from benchmarks.ucudnn.paper import figures, rows, run, sections
from benchmarks.ucudnn.paper.choices import (
    ALL,
    MIB,
    POWERS,
    UNDIVIDED,
    Kernel,
    all_within,
    each_within,
    make_fronts,
    seconds_of,
)
from PIL import Image
from torch import nn

from anybatch.conv.divide import sizes
from anybatch.conv.measure import Costs
from anybatch.conv.problem import KERNELS, Problem
from anybatch.core.plan_sections import Configuration, KernelPart

SECOND = Problem("forward", 64, 192, (27, 27), (5, 5), (1, 1), (2, 2), (1, 1))


def test_the_kernels_of_alexnet_are_those_of_the_paper_but_one() -> None:
    recorded = listen(NETWORKS["alexnet"])
    assert [(h.layer, h.problem.kernel) for h in recorded if h.count == 1] == [
        (f"conv{layer}", kernel)
        for layer in range(1, 6)
        for kernel in KERNELS
        if (layer, kernel) != (1, "data")  # images need no gradient
    ]
    assert next(h.problem for h in recorded if h.layer == "conv2") == SECOND


@pytest.mark.parametrize(("name", "layers"), [("resnet18", 20), ("resnet50", 53)])
def test_a_layer_that_comes_often_is_one_kernel_with_a_count(name: str, layers: int) -> None:
    network = NETWORKS[name]
    recorded = listen(Network(network.title, network.make, (3, 64, 64), 1, 1))
    assert sum(h.count for h in recorded) == 3 * layers - 1
    found = {
        h.layer: (h.problem.weight, h.count) for h in recorded if h.problem.kernel == "forward"
    }
    assert found["conv2"] == (((64, 64, 3, 3), 4) if name == "resnet18" else ((64, 64, 1, 1), 1))
    assert len(recorded) < sum(h.count for h in recorded)


def test_a_module_inside_a_network_has_all_three_kernels_of_every_branch() -> None:
    recorded = listen(MODULES["inception 3a"], "cuda")
    assert sum(h.count for h in recorded) == 3 * 6
    assert {h.problem.device for h in recorded} == {"cuda"}


def test_the_networks_have_the_published_numbers_of_parameters() -> None:
    with torch.device("meta"):
        made = [models.alexnet(), models.densenet40(growth=12)]
    millions = [round(sum(p.numel() for p in model.parameters()) / 1e6, 1) for model in made]
    assert millions == [61.1, 1.0]
    convolutions = [m for m in made[1].modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) + 1 == 40  # and the linear layer


class FixedCosts(Costs):
    """Two algorithms: torch's at 4 seconds a sample, and one of 1 that needs 10 bytes of each."""

    def duel(self, problem: Problem, configuration: Configuration, *, run: bool = True) -> float:
        return 0.9

    def parts(
        self,
        problem: Problem,
        size: int,
        policy: str,
        limit: int,
        seconds: float | None = None,
    ) -> list[KernelPart]:
        own = [KernelPart(n, "native", 4.0 * n, 0 if n == size else n) for n in sizes(policy, size)]
        return own + [KernelPart(n, "fft", 1.0 * n + 1, 10 * n) for n in sizes(policy, size)]


def kernels(*policies: str) -> list[Kernel]:
    found = [Kernel(RecordedKernel("conv1", SECOND, 1)), Kernel(RecordedKernel("conv2", SECOND, 2))]
    for policy in policies:
        make_fronts(FixedCosts(), found, 6, policy, 1000)
    return found


def test_a_policy_chooses_from_its_own_parts_within_the_workspace() -> None:
    one = kernels(POWERS, ALL)[0]
    assert (one.own.seconds, one.own.workspace) == (24.0, 0)
    assert str(one.within(UNDIVIDED, 60)) == "fft@6"
    assert str(one.within(UNDIVIDED, 59)) == "native@6"
    assert str(one.within(POWERS, 59)) == "fft@4, fft@2"
    assert str(one.within(ALL, 59)) == "fft@3 x 2"  # as fast, in less
    assert one.within(ALL, 59).seconds == one.within(POWERS, 59).seconds == 8.0
    assert str(one.within(POWERS, 39)) == "fft@2 x 3"


@pytest.mark.parametrize(
    ("share", "ratio", "chosen"), [(0.96, 0.1, 0), (0.8, 0.9, 1), (0.8, 1.0, 0)]
)
def test_what_is_hardly_faster_or_loses_a_duel_is_left_to_torch(
    share: float, ratio: float, chosen: int
) -> None:
    class Noisy(FixedCosts):
        def duel(
            self, problem: Problem, configuration: Configuration, *, run: bool = True
        ) -> float:
            assert str(configuration) == "im2col@6"
            return ratio

        def parts(self, problem: Problem, size: int, *args: object) -> list[KernelPart]:
            return [KernelPart(size, "native", 1.0, 0), KernelPart(size, "im2col", share, 5)]

    found = [Kernel(RecordedKernel("conv1", SECOND, 1))]
    make_fronts(Noisy(), found, 6, POWERS, 1000)
    names = ["native@6", "im2col@6"][: 1 + chosen]
    assert [str(c) for c in found[0].fronts[POWERS]] == names
    assert [str(c) for c in found[0].fronts[UNDIVIDED]] == names


def test_wd_is_the_fastest_of_all_choices_within_the_total_and_counts_every_layer() -> None:
    found = kernels(POWERS)
    fronts = [found[0].fronts[POWERS]] * 3  # of one layer, and of two that are alike
    for workspace in (5, 13, 20, 27, 40, 60):
        shared = all_within(found, POWERS, 3 * workspace)
        fit = [c for c in product(*fronts) if sum(one.workspace for one in c) <= 3 * workspace]
        assert seconds_of(shared.chosen) == min(map(seconds_of, fit))
        assert seconds_of(shared.chosen) <= seconds_of(each_within(found, POWERS, workspace))
        assert (len(shared.chosen), shared.variables) == (3, sum(map(len, fronts)))


def test_one_byte_less_is_a_fall_that_division_softens() -> None:
    row = sections.cliff(kernels(POWERS))[0]
    cells = {key: (row[key]["chosen"], row[key]["seconds"]) for key in ("best", "less", "divided")}
    assert cells == {
        "best": ("fft@6", 7.0),
        "less": ("native@6", 24.0),
        "divided": ("fft@4, fft@2", 8.0),
    }


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
def test_it_runs_and_its_tables_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wide() -> nn.Module:
        layers = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 3, padding=1, groups=2), nn.Flatten()
        return nn.Sequential(*layers, nn.Linear(2 * 12 * 12, 10))

    names = {"alexnet": NETWORKS, LARGE: NETWORKS, "wide branches": MODULES}
    for name, catalogue in names.items():
        inner = catalogue is MODULES
        monkeypatch.setitem(catalogue, name, Network(name, wide, (2, 12, 12), 2, 2, inner=inner))
    duel = Costs.duel
    monkeypatch.setattr(
        Costs, "duel", lambda *args, **run: 0.0 * duel(*args, **run)
    )  # who wins is the clock's
    found = run.measured([*names], "cpu", 2)
    assert list(found["networks"]["alexnet"]["took"]) == [POWERS, ALL]
    took = found["networks"]["alexnet"]["took"]
    assert took[ALL]["measuring"] > took[POWERS]["measuring"]  # of which it is a part
    assert found["networks"][LARGE]["kernels"] == 5
    assert set(found["networks"]["alexnet"]["each"][str(64 * MIB)]) == {UNDIVIDED, POWERS, ALL}
    assert set(found["networks"]["alexnet"]["each"][str(512 * MIB)]) == {UNDIVIDED, POWERS}
    assert all(check["same"] for check in found["networks"][LARGE]["checks"])
    _never_slower(found)
    for write in (rows.conv_paper, *rows.MORE):
        assert write(found).startswith("### ")
    assert rows.conv_paper(found).count("\n| ") == 2 + 2 * 3
    drawn = figures.draw(found, tmp_path)
    assert {"figure_9.png", "figure_10.png", "figure_12.png", "figure_13.png"} <= set(drawn)
    for name in drawn:
        with Image.open(tmp_path / name) as picture:
            assert picture.width > 300


def _never_slower(found: dict[str, Any]) -> None:
    """More workspace and more freedom never cost seconds, in choices from the same parts."""
    for one in found["networks"].values():
        for policy in (UNDIVIDED, POWERS):
            by_space = [each[policy]["seconds"] for each in one["each"].values()]
            assert by_space == sorted(by_space, reverse=True)
        for each in one["against"].values():
            assert each["WD"]["seconds"] <= each["WR"]["seconds"] * (1 + 1e-9)
            assert each["WR"]["seconds"] <= each["WR, undivided"]["seconds"]
            assert each["WD"]["workspace"] <= each["total"]


def test_without_cuda_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run.main(device="cuda", out=tmp_path)
    assert "no CUDA device here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_device_whose_kernels_are_left_to_torch_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert device.refusal("cpu") is None
    monkeypatch.setattr("anybatch.conv.convolutions.intercepted", _nothing)
    assert "leaves all kernels on cpu to torch" in str(device.refusal("cpu"))


class _nothing:  # noqa: N801
    def __init__(self, *args: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass
