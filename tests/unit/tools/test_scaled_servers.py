"""Lemma 3.2 and what is beyond it, beside counting servers one by one and beside the simulation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from benchmarks.simulators.parameter_servers import Cluster, remedies, servers_for, simulate
from hypothesis import given
from hypothesis import strategies as st

from anybatch.tools.scaled import NetworkLink, _served


def drawn(seed: int) -> Cluster:
    rng = random.Random(seed)
    return Cluster(
        rng.randint(1, 12),
        rng.uniform(0.1, 3),
        rng.randint(1, 10**9),
        rng.uniform(1e7, 3e9),
        worker=rng.choice([float("inf"), rng.uniform(1e7, 3e9)]),
        hottest=rng.choice([0.0, rng.uniform(0, 1)]),
        pipelined=rng.random() < 0.7,
        duplex=rng.random() < 0.3,
    )


clusters = st.integers(0, 10**6).map(drawn)


@given(st.integers(1, 50), st.integers(1, 300), st.integers(1, 10**9), st.integers(1, 10**9))
def test_the_lemma_is_the_fewest_servers_that_keep_equation_7(
    workers: int, tenths: int, parameters: int, bandwidth: int
) -> None:
    found = servers_for(workers, tenths / 10, parameters, bandwidth)

    def holds(servers: int) -> bool:
        return Fraction(tenths, 10) >= Fraction(2 * parameters * workers, servers * bandwidth)

    assert holds(found) or found > 10**7  # a billionth is rounding
    assert found == 1 or not holds(found - 1)


@given(st.integers(1, 50), st.floats(0.1, 3), st.integers(1, 10**9), st.floats(1e6, 3e9))
def test_a_plan_states_the_servers_and_the_traffic_of_the_lemma(
    workers: int, compute: float, parameters: int, bandwidth: float
) -> None:
    cluster = Cluster(workers, compute, parameters, bandwidth, worker=bandwidth)
    wanted = cluster.servers_for()
    for servers in ("auto", 3):
        found = _served(servers, workers, compute, parameters, NetworkLink(bandwidth))
        assert (found.fewest, found.reason) == (wanted.count, wanted.reason)
        count = wanted.count if servers == "auto" else servers
        traffic = cluster.own_seconds if count is None else cluster.io_seconds(count)
        assert found.traffic == traffic / compute


@given(clusters, st.floats(0.05, 1))
def test_the_fewest_servers_are_those_of_counting(cluster: Cluster, wanted: float) -> None:
    found = cluster.servers_for(wanted).count
    fits = (s for s in range(1, 3000) if cluster.utilisation(s) >= wanted * (1 - 1e-8))
    if found is None or found < 3000:
        assert found == next(fits, None)
    assert (found is None) == bool(cluster.servers_for(wanted).reason)


@given(clusters, st.integers(1, 50))
def test_more_servers_a_longer_round_or_a_better_link_is_never_worse(
    cluster: Cluster, servers: int
) -> None:
    now = cluster.utilisation(servers)
    assert 0 < now <= 1
    assert cluster.utilisation(servers + 1) >= now
    assert replace(cluster, compute=2 * cluster.compute).utilisation(servers) >= now
    assert replace(cluster, server=2 * cluster.server).utilisation(servers) >= now
    assert replace(cluster, workers=cluster.workers + 1).utilisation(servers) <= now
    assert replace(cluster, pipelined=True).utilisation(servers) >= now
    assert replace(cluster, hottest=0).utilisation(servers) >= now


@given(clusters)
def test_no_number_of_servers_is_faster_than_a_workers_own_link(cluster: Cluster) -> None:
    narrowed = replace(
        cluster, worker=2 * cluster.parameters / cluster.compute / 1.01, duplex=False
    )
    for pipelined in (True, False):
        found = replace(narrowed, pipelined=pipelined)
        assert found.servers_for().count is None
        assert not any(found.masked(s) for s in (1, 10, 10**6))


@given(clusters.filter(lambda c: c.pipelined), st.integers(1, 20))
def test_each_remedy_is_enough_and_a_little_less_is_not(cluster: Cluster, servers: int) -> None:
    found = remedies(cluster, servers)
    assert bool(found) != cluster.masked(servers)
    for name, better in found.items():
        assert better.masked(servers), name
    if "compute" in found:
        longer = found["compute"].compute
        assert not replace(cluster, compute=0.999 * longer).masked(servers)
        links = found["bandwidth"]
        slower = replace(
            links,
            server=max(cluster.server, 0.999 * links.server),
            worker=max(cluster.worker, 0.999 * links.worker),
        )
        assert not slower.masked(servers) or slower == links


def test_nothing_helps_a_loop_that_waits_for_its_transfers() -> None:
    cluster = Cluster(4, 1.0, 10**8, 1e9, pipelined=False)
    assert remedies(cluster, 1) == {}
    assert not cluster.masked(100)
    assert str(cluster.servers_for()).endswith("nothing is hidden without pulling ahead")


def test_what_is_in_the_way_is_said() -> None:
    cluster = Cluster(8, 1.0, 10**8, 4e8)
    assert str(cluster.servers_for()) == "4 parameter servers"
    assert str(replace(cluster, workers=1).servers_for()) == "1 parameter server"
    own = str(replace(cluster, worker=1e8).servers_for())
    assert own == "no number of parameter servers: a worker's own link needs 2 s a round"
    hot = str(replace(cluster, hottest=0.5).servers_for())
    assert hot == "no number of parameter servers: the hottest server needs 2 s a round"


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="workers must be an integer of at least 1"):
        Cluster(0, 1, 1, 1)
    with pytest.raises(ValueError, match="worker must be a bandwidth above 0"):
        Cluster(1, 1, 1, 1, worker=0)
    with pytest.raises(ValueError, match="hottest must be a share"):
        Cluster(1, 1, 1, 1, hottest=1.5)
    with pytest.raises(ValueError, match="utilisation must be above 0 and at most 1"):
        Cluster(1, 1, 1, 1).servers_for(0)
    with pytest.raises(ValueError, match="servers must be an integer of at least 1"):
        Cluster(1, 1, 1, 1).masked(0)


def test_the_simulation_never_does_better_and_nearly_as_well(
    counted: Callable[[int], int],
) -> None:
    """Its rounds begin and end in the middle of transfers: a round of them is the slack."""
    rounds = 45
    for seed in range(counted(200)):
        rng = random.Random(seed)
        base = replace(drawn(seed), pipelined=True)
        servers = rng.randint(1, 5)
        load = rng.uniform(0.5, 2)  # of the busiest server, over computing
        share = base.largest_share(servers)
        bandwidth = base.volume * base.workers * share / (load * base.compute)
        own = base.volume / base.compute / rng.uniform(0.2, 0.7)
        worker = rng.choice([float("inf"), own])
        cluster = replace(base, server=bandwidth, worker=worker)
        bound = cluster.utilisation(servers)
        found = simulate(cluster, servers, rounds=rounds, seed=seed).utilisation
        assert found <= bound * (1 + 3 / (rounds - 10)), (cluster, servers)
        assert found >= 0.85 * bound, (cluster, servers)


@pytest.mark.parametrize("workers", [4, 8])
@pytest.mark.parametrize("servers", [2, 4])
def test_the_lemma_is_tight_when_the_load_is_even(workers: int, servers: int) -> None:
    """At N servers workers hardly wait, and at N - 1 they compute (N - 1) / N of their time."""
    cluster = Cluster(workers, 1.0, 10**8, 2e8 * workers / servers)
    assert cluster.servers_for().count == servers
    at = {n: simulate(cluster, n).utilisation for n in (servers - 1, servers, servers + 1)}
    assert at[servers] >= 0.98
    assert at[servers - 1] == pytest.approx((servers - 1) / servers, rel=0.03)
    assert at[servers + 1] - at[servers] <= 0.02


@pytest.mark.parametrize("seed", range(8))
def test_without_pulling_ahead_a_round_is_between_two_bounds(seed: int) -> None:
    """Alone on its links a worker waits least; with all others at the same moment, most."""
    rng = random.Random(seed)
    servers, workers = rng.randint(1, 4), rng.randint(2, 8)
    base = Cluster(workers, 1.0, 10**8, 1.0, pipelined=False)
    cluster = replace(base, server=2e8 * workers / servers / rng.uniform(0.3, 2))
    most = cluster.round_seconds(servers)
    single = replace(cluster, workers=1).round_seconds(servers)
    least = max(single, cluster.server_seconds(servers))
    found = simulate(cluster, servers, rounds=60, seed=seed).seconds
    assert least * 0.95 <= found <= most * 1.05
