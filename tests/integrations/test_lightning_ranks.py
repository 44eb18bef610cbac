"""`FullBatch` over two processes: the batch, the loss, and what is logged are those of both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "lightning.pytorch", reason="pip install 'anybatch[lightning]' is needed for these tests"
)

from tests.integrations.fits import FitRecorder, assert_full_batch, made


def test_ranks_share_the_batch(tmp_path: Path) -> None:
    words = ["tests.integrations.forked", "tests.integrations.fits_on_ranks", str(tmp_path), "3"]
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    for step in range(2):
        observed = FitRecorder()
        module = made()
        module.load_state_dict(ranks[0]["before"][step])
        pairs = zip(*(rank["batches"][step] for rank in ranks), strict=True)
        observed.batches.append([torch.cat(pair) for pair in pairs])
        for rank in ranks:
            observed.before, observed.after = [module], [rank["after"][step]]
            observed.outputs = [rank["outputs"][step]]
            module.load_state_dict(ranks[0]["before"][step])
            assert_full_batch(observed, least=1)
            shown = rank["outputs"][step]["loss"]
            assert torch.equal(rank["logged"][step]["loss"], shown)
            assert torch.equal(rank["logged"][step]["mean"], ranks[0]["logged"][step]["mean"])
