from __future__ import annotations

import math

import pytest
import torch

from anybatch.tools.exactness import FLOOR, error_of, tolerance


def test_a_tensor_is_measured_by_its_own_largest_entry() -> None:
    want = {"a": torch.tensor([1.0, -4.0])}
    assert error_of({"a": torch.tensor([1.0, -4.2])}, want)["a"] == pytest.approx(0.05)


def test_a_tensor_whose_truth_is_zero_is_measured_by_the_others() -> None:
    want = {"big": torch.tensor([100.0]), "zero": torch.tensor([0.0])}
    got = {"big": torch.tensor([100.0]), "zero": torch.tensor([0.5])}
    assert error_of(got, want)["zero"] == pytest.approx(0.5 / (0.01 * 100.0))


def test_what_only_one_side_has_is_infinitely_wrong() -> None:
    one = {"a": torch.zeros(2)}
    assert error_of({}, one) == {"a": math.inf}
    assert error_of(one, {}) == {"a": math.inf}
    assert error_of({"a": torch.zeros(3)}, one) == {"a": math.inf}


def test_nan_must_stand_where_nan_stands() -> None:
    nan = {"a": torch.tensor([math.nan, 1.0])}
    assert error_of(nan, nan) == {"a": 0.0}
    assert error_of({"a": torch.tensor([0.0, 1.0])}, nan) == {"a": math.inf}
    assert error_of({"a": torch.tensor([math.inf])}, {"a": torch.tensor([1.0])}) == {"a": math.inf}
    same = {"a": torch.tensor([math.inf, 2.0])}
    assert error_of(same, same) == {"a": 0.0}


def test_counters_are_equal_or_wrong() -> None:
    assert error_of({"n": torch.tensor(3)}, {"n": torch.tensor(3)}) == {"n": 0.0}
    assert error_of({"n": torch.tensor(3)}, {"n": torch.tensor(4)}) == {"n": math.inf}


def test_the_bound_is_the_floor_or_ten_times_the_noise() -> None:
    assert tolerance() == FLOOR == 1e-12
    assert tolerance({"a": 1e-15}) == 1e-12
    assert tolerance({"a": 1e-15, "b": 3e-12}) == pytest.approx(3e-11)


def test_sparse_and_half_tensors_are_compared_by_value() -> None:
    dense = torch.eye(3)
    assert error_of({"a": dense.to_sparse()}, {"a": dense.bfloat16()}) == {"a": 0.0}
