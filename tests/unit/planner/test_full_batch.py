from __future__ import annotations

import numpy as np
import pytest

from anybatch.planner.full_batch import Timeline, bound_of


def test_a_guess_of_one_row_counts_each_event() -> None:
    """One row holds most where gradients are, and many where activations are."""
    owners, events = ("gradients", "activations"), ("forward", "backward")
    row = Timeline(owners, events, np.array([[0, 100], [1000, 10]]))
    line = bound_of([row], (1,))
    assert line.at(1).peak == pytest.approx(1011, abs=1)
    assert line.at(64).peak == pytest.approx(64 * 110, abs=64)
    assert bound_of([row], (1,), 800).at(64).peak == pytest.approx(200 + 64 * 891, abs=64)
