"""A real SIGINT at random launches of a step: it happened whole, or not at all (Law 5)."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.devices.steps import KINDS, setting, values
from tests.oracle import same

MOMENTS = 300
"""In all of the matrix, under --soak."""


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("variant", KINDS)
def test_at_random_launches(
    stand_in: Any, variant: str, first: bool, counted: Callable[[int], int]
) -> None:
    stand_in.watch(stacks=False)  # an interrupt in there would be lost
    made = setting(variant, first=first)
    begun = stand_in.statistics()["launches"]
    made.step()
    total = stand_in.statistics()["launches"] - begun
    after = values(made.state())
    cells = 2 * len(KINDS)
    moments = random.Random(f"{variant} {first}").choices(range(total), k=counted(MOMENTS // cells))
    outcomes = {"before": 0, "after": 0}
    for moment in moments:
        made = setting(variant, first=first)
        before = made.state()
        interrupted = False
        stand_in.interrupt(moment)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                interrupted = True
                made.step()
                interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        stand_in.interrupt(-1)
        now = made.state()
        was, done = same(values(before), values(now)), same(after, values(now))
        assert was or done, f"half a step, at launch {moment} of {total}"
        assert now["hooks"] == before["hooks"]
        outcomes["before" if was else "after"] += interrupted
        if was:
            made.step()
            assert same(after, values(made.state())), f"another step, after launch {moment}"
    assert outcomes["before"] > 0
