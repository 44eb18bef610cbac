from __future__ import annotations

import numpy as np
import pytest
from tests.cases import line_of

from anybatch.planner.forecast import BentTimeline, steeper


@pytest.mark.parametrize("owners", [("parameters", "activations", "gradients"), ("all",)])
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_a_steeper_line_has_more_bytes_for_each_sample(n: int, owners: tuple[str, ...]) -> None:
    line = line_of(owners, np.arange(3 * len(owners)).reshape(3, -1))
    for one in (line, BentTimeline(line, line, 3)):
        before, found = one.at(n), steeper(one, 5).at(n)
        assert (found.live.sum(1) == before.live.sum(1) + 5 * n).all()
        column = owners.index("activations") if len(owners) > 1 else 0
        assert (found.live[:, column] == before.live[:, column] + 5 * n).all()
