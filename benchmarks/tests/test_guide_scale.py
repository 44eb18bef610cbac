"""The guide's benchmarks of scale: tiny runs, their tables, and the calibration by known sums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.guide.figures import run as figures
from benchmarks.guide.figures.rows import guide_figures, guide_figures_errors
from benchmarks.guide.gpus import rows as gpus_rows
from benchmarks.guide.gpus import run as gpus
from benchmarks.guide.numbers import run as numbers
from benchmarks.guide.numbers.rows import numbers as numbers_table
from benchmarks.guide.pace import run as pace
from benchmarks.guide.pace.rows import guide_pace
from benchmarks.guide.servers import rows as servers_rows
from benchmarks.guide.servers import run as servers
from benchmarks.ucudnn.models import LARGE, NETWORKS, Network
from torch import nn
from typer.testing import CliRunner

from anybatch.cli.cli import app
from anybatch.tools.gpus import NetworkLink


def output(*words: str) -> str:
    """Return what the command prints."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
def test_a_tiny_run_of_processes(tmp_path: Path) -> None:
    gpus.main(quick=True, out=tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    (case,) = results["measured"].values()
    assert [*case] == ["1", "2"]
    assert case["1"]["quartiles"][1] > case["2"]["quartiles"][1] > 0
    assert gpus_rows.guide_gpus(results).count("\n") == 3
    assert gpus_rows.guide_gpus_summary(results).count("\n") == 2
    assert json.loads((tmp_path / "inputs.json").read_text())["links"] == results["links"]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_the_link_is_that_whose_sums_were_timed(count: int) -> None:
    link = NetworkLink(3e8, 2e-4)
    seconds = {str(size): link.all_reduce(size, count) for size in (1 << 20, 3 << 20, 1 << 25)}
    found = gpus.link_of(seconds, count)
    assert found["bandwidth"] == pytest.approx(link.bandwidth)
    assert found["latency"] == pytest.approx(link.latency)


def test_a_tiny_simulation_of_servers(tmp_path: Path) -> None:
    servers.main(quick=True, out=tmp_path, real=False)
    results = json.loads((tmp_path / "results.json").read_text())
    assert "| jitter 0 |" in servers_rows.servers_summary(results)
    assert servers_rows.servers(results).count("\n") == 1 + len(results["simulated"])
    refused = {**results, "real": {"refused": "no namespaces"}}
    assert "no namespaces" in servers_rows.servers_real(refused)


def test_the_numbers_are_computed(tmp_path: Path) -> None:
    numbers.main(out=tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    saved = json.loads((numbers.HERE / "results.json").read_text())
    same = ("lemmas", "traffic", "memory", "table 2", "classes")
    assert {k: found[k] for k in same} == {k: saved[k] for k in same}
    assert "Lemma 3.1" in numbers_table(found)


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
def test_a_tiny_run_is_foreseen_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands run in this process: how one starts is told by the tests of the command."""
    monkeypatch.setattr(pace, "anybatch", output)
    pace.main(quick=True, out=tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    (run,) = results["runs"].values()
    low, middle, high = run["foreseen"]
    assert 0 < low <= middle <= high
    assert 0 < run["trained"] < run["whole"]
    assert guide_pace(results).count("\n") == 2


def test_tiny_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Network(
        "small", lambda: nn.Sequential(nn.Conv2d(3, 4, 5), nn.Flatten()), (3, 8, 8), 1, 1, ""
    )
    monkeypatch.setitem(NETWORKS, LARGE, small)
    figures.main(quick=True, out=tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["samples"] for row in results["figure 2"]] == [2]
    assert guide_figures(results).count("\n") == 2
    assert guide_figures_errors(results).count("\n") == 2
    assert (tmp_path / "figure_2.png").stat().st_size > 1000
    assert (tmp_path / "figure_3.png").stat().st_size > 1000
