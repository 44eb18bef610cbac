"""What every test shares: one thread, a seed, and the size of large counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="full counts instead of a seeded tenth")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Return how many of `full` cases to run: all under --soak, else a tenth, at least one."""
    soak = bool(request.config.getoption("--soak"))
    return lambda full: full if soak else max(1, full // 10)
