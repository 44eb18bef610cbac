"""The benchmark of memory and time: every way is measured, told and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.mbs.models import Attention, TransformerLM
from benchmarks.mbs.problem import Problem
from benchmarks.outofcore.frontier import figure, ours, rows, run
from benchmarks.outofcore.frontier.networks import NETWORKS, Network
from benchmarks.outofcore.frontier.peers import files
from torch import nn

from anybatch.cli.models.resnet import Residual, resnet20


def _small() -> Problem:
    x, y = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    return Problem(resnet20(norm="batch", blocks=1), nn.CrossEntropyLoss(), None, x, y, 8)


def test_every_way_is_measured_described_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "SHARES", (0.8, 0.01))  # the last one is refused
    found = run.one(Network("small", _small, Residual), 2, tmp_path)
    ways = {(line, name): r for line, ones in found["lines"].items() for name, r in ones.items()}
    assert all(row["same gradient"] for row in ways.values())
    twice = {line for (line, _), row in ways.items() if not row["same buffers"]}
    assert twice == {"checkpoint"}  # it runs BatchNorm's forward again
    assert ways["checkpoint", "every block"]["peak"] < found["in memory"]
    assert ways["files by hand", "every saved tensor"]["peak"] < found["in memory"]
    within = [row for row in ways.values() if "budget" in row]
    assert len(within) == 2
    assert all(row["peak"] <= row["budget"] for row in within)
    assert not any(row["remade"] for row in found["lines"]["offload, moving"].values())
    assert not list(tmp_path.iterdir())
    results = {"modes": {"default": {"networks": {"resnet": found}}}}
    assert rows.frontier(results).count("\n") == 1 + len(ways)
    drawn = figure.frontier(results)
    assert len(drawn.axes[0].lines) == 1 + len(found["lines"])
    figure.draw(results, tmp_path)
    assert (tmp_path / figure.NAME).read_bytes().startswith(b"\x89PNG")


def test_files_by_hand_keep_every_bit_and_layout(tmp_path: Path) -> None:
    x, w = torch.randn(4, 200, 100), nn.Parameter(torch.randn(200, 100))
    with files(nn.ParameterList([w]), tmp_path):
        graph_node = (x.transpose(1, 2)[1:] * w.t()).grad_fn
        assert len(list(tmp_path.glob("*/*"))) == 1  # not the weight
        back = graph_node._saved_self
    assert torch.equal(back, x.transpose(1, 2)[1:])
    assert back.stride() == x.transpose(1, 2).stride()


def test_the_blocks_of_a_network_are_found_in_order() -> None:
    model = TransformerLM(width=8, layers=3, length=8)
    assert NETWORKS["transformer"].blocks(model) == list(model.blocks)
    assert all(isinstance(one, Attention) for one in model.blocks)
