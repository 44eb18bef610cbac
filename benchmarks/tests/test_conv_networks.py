"""The benchmark of whole steps: both sides take the same step, and its table is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.ucudnn.models import LARGE, NETWORKS, Network
from benchmarks.ucudnn.networks import rows, run
from torch import nn


def small() -> nn.Module:
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(), nn.Linear(4, 10))


def test_it_runs_and_its_table_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("alexnet", LARGE):
        monkeypatch.setitem(NETWORKS, name, Network(name, small, (3, 12, 12), 4, 3))
    found = {"modes": {"default": run.one_mode(["alexnet", LARGE], "cpu", 2)}}
    assert rows.conv_networks(found).count("\n") == 1 + 2 * 2
    assert "of 2 medians of usual networks are 0.98 or more" in rows.conv_networks_summary(found)
    for layouts in found["modes"]["default"]["networks"].values():
        for one in layouts.values():
            assert one["kernels"] == 2  # images need no gradient
            assert one["error"] < 1e-5


def test_gradients_are_of_the_same_draws_and_change_nothing() -> None:
    step = run.Step(Network("small", small, (3, 12, 12), 4, 3), torch.contiguous_format, "cpu")
    first, again = step.gradients(), step.gradients()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    step()
    assert not all(torch.equal(a, b) for a, b in zip(first, step.gradients(), strict=True))


def test_a_goal_that_is_missed_is_reported() -> None:
    one = {"ratio": [0.9, 0.97, 1.0]}
    networks = {"alexnet": {"contiguous": one}, LARGE: {"contiguous": {"ratio": [8, 8, 8]}}}
    text = rows.conv_networks_summary({"modes": {"default": {"networks": networks}}})
    assert text.startswith("0 of 1 medians")
    assert "largest 0.970" in text
    single = {"modes": {"default": {"networks": {LARGE: networks[LARGE]}}}}
    assert rows.conv_networks_summary(single) == "No usual network was measured."


def test_without_cuda_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run.main(device="cuda", out=tmp_path)
    assert list(tmp_path.iterdir()) == []
