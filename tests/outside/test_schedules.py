"""The benchmark of the schedules runs, and its tables say what it found."""

from __future__ import annotations

from pathlib import Path

import torch
from benchmarks.outofcore.models import DeepLabV3Plus, densenet121, pix2pixhd
from benchmarks.outofcore.schedules import rows
from benchmarks.outofcore.schedules.run import main
from benchmarks.results import read


def test_a_quick_run_writes_tables(tmp_path: Path) -> None:
    main(quick=True, out=tmp_path, networks="unet")
    results = read(tmp_path / "results.json")
    assert results is not None
    for one in results["networks"]["unet"]["8"]["machines"].values():
        assert one["memory"] <= one["bound"] * (1 + 1e-9) <= one["default"]["seconds"] * (1 + 1e-6)
    assert "U-Net, 512x512, 8 |" in rows.schedules(results)
    assert rows.schedules_summary(results).count("\n") == 4


def test_the_networks_have_the_published_numbers_of_parameters() -> None:
    with torch.device("meta"):
        models = [densenet121(), DeepLabV3Plus(), pix2pixhd()]
    millions = [round(sum(p.numel() for p in model.parameters()) / 1e6, 1) for model in models]
    assert millions == [8.0, 41.0, 182.5]
