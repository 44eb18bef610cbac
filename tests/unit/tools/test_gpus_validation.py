from __future__ import annotations

import pytest

from anybatch.tools.gpus import at_least, positive, positive_integer, share


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_number_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="seconds must be a finite number of at least 0, not"):
        at_least(0, seconds=value)
    with pytest.raises(ValueError, match="rate must be a finite number above 0, not"):
        positive(rate=value)
    with pytest.raises(ValueError, match="part must be a share from 0 to 1, not"):
        share(part=value)


@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_what_counts_is_an_integer_of_at_least_one(value: int) -> None:
    with pytest.raises(ValueError, match="gpus must be an integer of at least 1, not"):
        positive_integer(gpus=value)


def test_the_ends_of_a_range_belong_to_it() -> None:
    at_least(0, seconds=0.0)
    share(part=0.0, rest=1.0)
    positive_integer(gpus=1)
    with pytest.raises(ValueError, match="above 0, not 0"):
        positive(rate=0)
