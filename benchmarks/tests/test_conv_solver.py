"""The benchmark of the solver: a tiny run."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.ucudnn.solver.rows import conv_solver
from benchmarks.ucudnn.solver.run import main


def test_a_tiny_run(tmp_path: Path) -> None:
    main(quick=True, out=tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["solvers"]["ours"]["optimal"] == 2
    assert conv_solver(results).count("\n") == 3
