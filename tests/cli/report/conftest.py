"""A run on the digits, of two epochs within a budget: the folder it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from anybatch.cli.settings import Settings
from anybatch.cli.train import train


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that came to its end; nobody writes to it."""
    out = tmp_path_factory.mktemp("runs") / "run"
    train(
        Settings(
            model="cnn:4",
            batch_size=512,
            memory="1MiB",
            offload="off",
            epochs=2,
            threads=1,
            seed=5,
            out=out,
        )
    )
    return out
