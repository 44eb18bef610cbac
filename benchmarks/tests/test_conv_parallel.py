"""The benchmark of measuring in parallel: a tiny run, and what its columns mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.ucudnn.parallel.rows import conv_parallel
from benchmarks.ucudnn.parallel.run import compared, main
from tests.unit.conv.problems import problem

from anybatch.core.plan_sections import KernelPart


@pytest.mark.large(of="tiny runs of benchmarks", few=2)
def test_a_tiny_run(tmp_path: Path) -> None:
    main(quick=True, out=tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [one["processes"] for one in results["runs"]] == [1, 2]
    assert conv_parallel(results).count("\n") == 3


def test_what_differs_is_counted() -> None:
    key = problem("forward", 1, "plain"), 4
    first = {
        key: [
            KernelPart(4, "native", 4.0, 0),
            KernelPart(4, "fft", 1.0, 9),
            KernelPart(4, "im2col", 2.0, 9),
        ]
    }
    other = {
        key: [
            KernelPart(4, "native", 8.0, 0),
            KernelPart(4, "fft", 4.0, 9),
            KernelPart(4, "im2col", 2.0, 9),
        ]
    }
    found = compared(other, first, 3.0, 6.0, 2)
    assert found["differ"] == 1
    assert found["loss"] == 2.0  # im2col takes two, fft one
    assert found["share"] == 0.5
