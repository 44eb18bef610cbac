"""A CUDA device made of the host's memory, on which the code for CUDA runs in every check.

``pytest -p tests.devices.stand_in`` gives it to the processes of tests, and ``python -m
tests.devices -m module ...`` to any program. It is built and loaded before torch is imported. A
test fails that leaves a race behind, with the stacks of both sides. `world.h` says how races are
found, and `cudnn.h` what is called by cuDNN's names.

It stands in for a device's memory, order and errors. It says nothing of time, of the numbers of
other kernels than the CPU's, and of CUDA's own faults. On a torch for CUDA it does nothing: the
tests run on the device that is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.devices.build import NoStandInError, loaded

MISSING = ""
"""Why there is no stand-in; empty where there is one."""
DEVICE: Any = None
try:
    LIBRARY = loaded()
except NoStandInError as error:
    MISSING = str(error)
else:
    from tests.devices import cuda, nccl
    from tests.devices.device import Device

    DEVICE = Device(LIBRARY)
    cuda.patch(DEVICE)
    nccl.patch()


@pytest.fixture(autouse=True)
def _no_race() -> Iterator[None]:
    if DEVICE is None:
        yield
        return
    DEVICE.restore()
    yield
    found = DEVICE.faults()
    DEVICE.restore()
    if found:
        pytest.fail(f"{len(found)} races, of which the first is\n{found[0]}", pytrace=False)
