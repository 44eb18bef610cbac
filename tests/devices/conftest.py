"""The stand-in, for tests that set its levers."""

from __future__ import annotations

from typing import Any

import pytest
from tests.devices import stand_in as plugin


@pytest.fixture(scope="session", autouse=True)
def stand_in() -> Any:
    """Return the stand-in, as it is at the beginning."""
    if plugin.DEVICE is None:
        pytest.skip(f"no stand-in: {plugin.MISSING} (pytest -p tests.devices.stand_in)")
    return plugin.DEVICE
