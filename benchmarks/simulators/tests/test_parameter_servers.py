"""The simulation itself, on cases that are small enough to be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.simulators.parameter_servers import PIECES, Cluster, simulate

ONE = Cluster(1, 2.0, 1000, 1000.0)
"""A pull and a push of one second each, while a worker computes for two."""


def test_a_single_worker_waits_only_for_what_does_not_fit_behind_computing() -> None:
    assert simulate(ONE, 1, jitter=0).utilisation == pytest.approx(1)
    short = replace(ONE, compute=1.0)  # two seconds of traffic behind one of computing
    assert simulate(short, 1, jitter=0).seconds == pytest.approx(2, rel=0.03)
    assert simulate(replace(short, duplex=True), 1, jitter=0).seconds == pytest.approx(1)


def test_a_worker_that_does_not_pull_ahead_waits_for_all_of_it() -> None:
    for servers in (1, 2, 5):
        single = replace(ONE, pipelined=False)
        wanted = single.round_seconds(servers)
        assert simulate(single, servers, jitter=0).seconds == pytest.approx(wanted)


def test_a_piece_crosses_one_link_before_it_enters_the_other() -> None:
    """The last piece leaves the first link after one second, and takes its part of another."""
    single = replace(ONE, pipelined=False, worker=1000.0)
    wanted = 2 + 2 * (1 + 1 / PIECES)
    assert simulate(single, 1, jitter=0).seconds == pytest.approx(wanted)


def test_a_workers_own_link_is_the_limit_where_it_is_slowest() -> None:
    slow = replace(ONE, compute=1.0, server=1e9, worker=1000.0)
    assert simulate(slow, 3, jitter=0).seconds == pytest.approx(2, rel=0.03)


def test_the_hottest_server_is_the_limit_however_many_there_are() -> None:
    hot = Cluster(4, 1.0, 1000, 8000.0, hottest=0.8)  # 4 x 2000 x 0.8 / 8000 = 0.8 s
    assert simulate(hot, 6, jitter=0).utilisation == pytest.approx(1, abs=0.02)
    assert simulate(hot, 6, jitter=0).busiest == pytest.approx(0.8, abs=0.05)
    hotter = replace(hot, server=4000.0)
    assert simulate(hotter, 6, jitter=0).seconds == pytest.approx(1.6, rel=0.03)


def test_a_seed_is_a_run() -> None:
    cluster = Cluster(5, 1.0, 1000, 9000.0)
    assert simulate(cluster, 2, seed=3) == simulate(cluster, 2, seed=3)
    assert simulate(cluster, 2, seed=3) != simulate(cluster, 2, seed=4)


def test_rounds_that_do_not_count_are_fewer_than_all() -> None:
    with pytest.raises(ValueError, match="rounds must be more than warm, and they are 5 and 5"):
        simulate(ONE, 1, rounds=5, warm=5)
    with pytest.raises(ValueError, match="jitter must be a share from 0 to 1"):
        simulate(ONE, 1, jitter=2)
