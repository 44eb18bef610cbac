"""Honest networks are exact, never refused and never wrong: a seeded tenth of the benchmark's."""

from __future__ import annotations

import pytest
from benchmarks.mbs.honest import families
from benchmarks.mbs.honest.run import answer
from benchmarks.mbs.honest.subjects import SUBJECTS

families.register()  # torch's module database changes flags of its process: not here
NETWORKS = list(SUBJECTS)


def test_there_are_many_of_them() -> None:
    assert len(SUBJECTS) >= 150


@pytest.mark.large(few=6, part=30)
@pytest.mark.parametrize("name", NETWORKS)
def test_an_honest_network_is_exact(name: str) -> None:
    row = answer(name)
    if "skipped" in row:
        pytest.skip(row["skipped"])
    assert {one["outcome"] for one in row["splits"].values()} <= {"exact", "not claimed"}, row
