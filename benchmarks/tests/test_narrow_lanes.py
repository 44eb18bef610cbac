"""The benchmark of lanes that leave while they run: every way is measured and told."""

from __future__ import annotations

import pytest
from benchmarks.agbn.lanes_memory.one import Net
from benchmarks.outofcore.narrow import networks, rows, run
from torch import nn
from torch.nn import functional as F


def few_layers() -> nn.Module:
    """Layers enough that what leaves is most of a step."""
    layers: list[nn.Module] = []
    for channels in (3, 8, 8):
        layers += [nn.Conv2d(channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
def test_every_way_is_measured_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Net(few_layers, F.cross_entropy, 16, 4)
    monkeypatch.setitem(networks.NETWORKS, "small", small)
    found = run.one_mode(["small"], 2)
    one = found["networks"]["small"]
    floors = one["floors"]
    assert floors["narrow lanes"] < floors["lanes"] < floors["undivided"]
    for budget in one["budgets"].values():
        assert budget["ways"]
        for way in budget["ways"]:
            assert way["peak"] <= way["predicted"] <= budget["budget"]
            assert way["error"] < 1e-2
    below, above = one["budgets"].values()
    assert {way["way"] for way in below["ways"]} == {"leave"}
    assert {way["way"] for way in above["ways"]} == {"leave", "in memory"}
    results = {"modes": {"default": found}}
    count = sum(len(budget["ways"]) for budget in one["budgets"].values())
    assert rows.narrow(results).count("\n") == 1 + count
    assert rows.narrow_floors(results).count("\n") == 2
