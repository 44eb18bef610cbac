"""The benchmark of the schedules runs, and its tables say what it found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.outofcore.models import DeepLabV3Plus, densenet121, pix2pixhd
from benchmarks.outofcore.schedules import figures, rows
from benchmarks.outofcore.schedules.run import main
from benchmarks.results import HERE, read
from PIL import Image


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
def test_a_quick_run_writes_tables(tmp_path: Path) -> None:
    main(quick=True, out=tmp_path, networks="unet")
    results = read(tmp_path / "results.json")
    assert results is not None
    for one in results["networks"]["unet"]["8"]["machines"].values():
        assert one["memory"] <= one["bound"] * (1 + 1e-9) <= one["default"]["seconds"] * (1 + 1e-6)
    assert "U-Net, 512x512, 8 |" in rows.schedules(results)
    assert rows.schedules_summary(results).count("\n") == 4
    for one in results["networks"]["unet"]["8"]["machines"].values():
        assert min(one["windows"].values()) == one["window"]["seconds"]
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {"figure_4.png", "figure_5.png", "windows.png"}  # Figure 3 is of ResNet-50
    for name in drawn:
        (tmp_path / name).unlink()
    figures.main(out=tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == drawn


def test_the_figures_show_what_the_results_say(tmp_path: Path) -> None:
    results = read(HERE / "outofcore/schedules/results.json")
    assert results is not None
    speeds = figures.speeds(results)
    assert speeds is not None
    shown = {axes.get_title(): axes for axes in speeds.axes}
    assert len(shown) == 15
    lines = {line.get_label(): line for line in shown["ResNet-50; V100, NVLink"].get_lines()}
    sizes = results["networks"]["resnet50"]
    for label, key in (("default", "default"), ("the paper's policy", "window")):
        found = {
            n: int(n) / one["machines"]["V100, NVLink"][key]["seconds"] for n, one in sizes.items()
        }
        pairs = zip(*lines[label].get_data(), strict=True)
        assert dict(pairs) == {int(n): pytest.approx(rate) for n, rate in found.items()}
    drawn = figures.draw(results, tmp_path)
    assert {"figure_3.png", "figure_4.png", "figure_5.png"} <= set(drawn)
    for name in drawn:
        with Image.open(tmp_path / name) as picture:
            assert picture.width > 600
            assert picture.height > 300


def test_the_networks_have_the_published_numbers_of_parameters() -> None:
    with torch.device("meta"):
        models = [densenet121(), DeepLabV3Plus(), pix2pixhd()]
    millions = [round(sum(p.numel() for p in model.parameters()) / 1e6, 1) for model in models]
    assert millions == [8.0, 41.0, 182.5]
