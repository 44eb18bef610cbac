"""Workers and parameter servers, event by event: what Lemma 3.2 promises, with queues.

Workers are asynchronous. While a worker computes a round, it pulls the parameters of the next and
pushes the updates of the one before:

    worker   |  compute 1  |  compute 2  |  compute 3  |
    pulls      <  for 2  >   <  for 3  >
    pushes                   <   of 1   >  <   of 2   >

Round r + 1 begins when round r has ended, its own parameters are there and the updates of round
r - 1 have left. Without pipelining a worker pulls, computes, pushes, and waits for each.

Each transfer is a shard for every server, cut in pieces. A link carries one piece at a time, in the
order in which they were asked for (first in, first out). A pull crosses the server's link, then the
worker's own; a push the other way round; a piece must have crossed one before it enters the other.
Workers ask servers in turn, each beginning with another, and start at random moments. Computing
varies evenly between 1 - jitter and 1 + jitter times T_C. Servers take no time to update.

Source: guide, section 3.3; this is the oracle of Lemma 3.2.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil, inf

from anybatch.tools.gpus import ROUNDING, positive, positive_integer, share

# How many parameter servers hide the traffic of asynchronous workers behind their computing.
#
# In a round a worker pulls all parameters and pushes all updates, 2 S_p bytes, while it computes
# for T_C. The traffic of N_w workers is divided among N_ps servers, each of bandwidth B_ps:
#
#     worker   |  compute  |  compute  |        hidden as long as
#     servers  | pull push | pull push |            T_C >= 2 S_p N_w / (N_ps B_ps)
#
# Three things are beyond the lemma. A worker's own link carries 2 S_p bytes a round, and no number
# of servers makes it faster. A server that holds the largest share of the parameters, because one
# tensor is not divided or the load is not even, has more traffic than the others. And a loop that
# does not pull ahead waits for all of it: T = T_C + T_io.
#
# Utilisation is T_C over the seconds of a round. Here it is that of a fluid: traffic that flows
# evenly. Real transfers queue, so it is an upper bound.
#
# Source: guide, Lemma 3.2, Equations 7 and 8, and the three measures of section 3.3.


@dataclass(frozen=True)
class Cluster:
    """Asynchronous workers, their traffic, and the links to parameter servers.

    Attributes:
        workers: N_w.
        compute: T_C, seconds that a worker computes in a round.
        parameters: S_p, bytes.
        server: B_ps, bytes a second of one server's link.
        worker: bytes a second of a worker's own link. Default infinite, as in the lemma.
        hottest: share of the parameters that one server holds however many there are, such as the
            largest tensor's. Default 0: they are divided evenly.
        pipelined: pulls and pushes run while workers compute. Default True.
        duplex: links carry pulls and pushes at once. Default False: one after another, as in the
            lemma.
    """

    workers: int
    compute: float
    parameters: int
    server: float
    worker: float = inf
    hottest: float = 0.0
    pipelined: bool = True
    duplex: bool = False

    def __post_init__(self) -> None:
        positive_integer(workers=self.workers)
        positive(compute=self.compute, server=self.server, parameters=self.parameters)
        share(hottest=self.hottest)
        if not self.worker > 0:
            raise ValueError(f"worker must be a bandwidth above 0, not {self.worker!r}")

    @property
    def volume(self) -> int:
        """Bytes of a worker's round that go over a link one after another: 2 S_p, or S_p."""
        return self.parameters if self.duplex else 2 * self.parameters

    @property
    def own_seconds(self) -> float:
        """Seconds of a round's traffic on a worker's own link."""
        return self.volume / self.worker

    def largest_share(self, servers: int) -> float:
        """Return the share of the parameters on the server that holds most."""
        positive_integer(servers=servers)
        return max(1 / servers, self.hottest)

    def server_seconds(self, servers: int) -> float:
        """Return the seconds that the busiest server needs for a round of all workers."""
        return self.volume * self.workers * self.largest_share(servers) / self.server

    def io_seconds(self, servers: int) -> float:
        """Return T_io, the seconds of a round's traffic where it is slowest."""
        return max(self.server_seconds(servers), self.own_seconds)

    def round_seconds(self, servers: int) -> float:
        """Return T, the seconds of a worker's round: the longer of two, or their sum."""
        io = self.io_seconds(servers)
        return max(self.compute, io) if self.pipelined else self.compute + io

    def utilisation(self, servers: int) -> float:
        """Return T_C / T, the part of a round in which a worker computes."""
        return self.compute / self.round_seconds(servers)

    def masked(self, servers: int) -> bool:
        """Say whether all traffic is hidden behind computing, a billionth of it aside.

        Source: guide, Equation 7.
        """
        hidden = self.io_seconds(servers) * (1 - ROUNDING) <= self.compute
        return self.pipelined and hidden

    def servers_for(self, utilisation: float = 1.0) -> Servers:
        """Return the fewest servers with which workers compute for that part of their time.

        Args:
            utilisation: above 0 and at most 1. Default 1: all traffic is hidden.

        Source: guide, Lemma 3.2.
        """
        if not 0 < utilisation <= 1:
            raise ValueError(f"utilisation must be above 0 and at most 1, not {utilisation!r}")
        available = self.compute / utilisation - (0.0 if self.pipelined else self.compute)
        available *= 1 + ROUNDING
        if available <= 0:
            return Servers(None, "nothing is hidden without pulling ahead")
        if self.own_seconds > available:
            return Servers(None, f"a worker's own link needs {self.own_seconds:.3g} s a round")
        all_of_it = self.volume * self.workers / self.server
        if all_of_it * self.hottest > available:
            needs = all_of_it * self.hottest
            return Servers(None, f"the hottest server needs {needs:.3g} s a round")
        return Servers(max(1, ceil(all_of_it / available * (1 - ROUNDING))), "")


@dataclass(frozen=True)
class Servers:
    """How many servers a goal takes.

    Attributes:
        count: the fewest; None where no number of them reaches it.
        reason: the obstacle then, else "".
    """

    count: int | None
    reason: str

    def __str__(self) -> str:
        if self.count is not None:
            return f"{self.count} parameter server{'s' if self.count > 1 else ''}"
        return f"no number of parameter servers: {self.reason}"


def servers_for(workers: int, compute: float, parameters: int, bandwidth: float) -> int:
    """Return N_ps = ceil(2 S_p N_w / (B_ps T_C)), the lemma as it is printed.

    Args:
        workers: N_w, at least 1.
        compute: T_C, seconds of a worker's round.
        parameters: S_p, bytes.
        bandwidth: B_ps, bytes a second of one server's link.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> servers_for(8, compute=1.0, parameters=180_000_000, bandwidth=125e6)  # 1 Gbit/s
        24

    Source: guide, Lemma 3.2.
    """
    found = Cluster(workers, compute, parameters, bandwidth).servers_for().count
    assert found is not None
    return found


def remedies(cluster: Cluster, servers: int) -> dict[str, Cluster]:
    """Return the smallest of each of the guide's measures that hides all traffic.

    Returns:
        Measure -> the cluster with it: "compute" longer, such as by a larger mini-batch,
        "bandwidth" of servers and workers higher, "balance" of the load if only that is needed.
        Nothing if it is hidden already, or nothing is pulled ahead.

    Source: guide, section 3.3, measures 1 to 3.
    """
    if not cluster.pipelined or cluster.masked(servers):
        return {}
    short = cluster.io_seconds(servers) / cluster.compute
    own = max(1.0, cluster.own_seconds / cluster.compute)
    faster = max(1.0, cluster.server_seconds(servers) / cluster.compute)
    found = {
        "compute": replace(cluster, compute=cluster.compute * short),
        "bandwidth": replace(cluster, server=cluster.server * faster, worker=cluster.worker * own),
    }
    even = replace(cluster, hottest=0.0)
    return found | ({"balance": even} if even.masked(servers) else {})


# The simulation.

PIECES = 4
"""Parts of a shard that enter a link one after another."""

Then = Callable[[], None]


@dataclass(frozen=True)
class Simulation:
    """What workers did, between the time when all had warmed up and the first was ready.

    Attributes:
        utilisation: the part of it in which a worker computed, of all workers on average.
        seconds: of a round, on average.
        busiest: the part of it in which the busiest link of a server carried something.
    """

    utilisation: float
    seconds: float
    busiest: float


def simulate(
    cluster: Cluster,
    servers: int,
    *,
    rounds: int = 60,
    warm: int = 10,
    jitter: float = 0.1,
    seed: int = 0,
) -> Simulation:
    """Return what the workers of a cluster do with so many servers.

    Args:
        cluster: workers, parameters, links.
        servers: N_ps, at least 1.
        rounds: after which a worker is ready, more than `warm`. Default 60.
        warm: rounds that do not count. Default 10.
        jitter: of computing, from 0 to 1. Default 0.1.
        seed: of the draws.

    Raises:
        ValueError: a number is out of range.
    """
    positive_integer(servers=servers, rounds=rounds, warm=warm)
    share(jitter=jitter)
    if rounds <= warm:
        raise ValueError(f"rounds must be more than warm, and they are {rounds} and {warm}")
    run = _Run(cluster, servers, rounds, jitter, random.Random(seed))
    run.until_one_is_ready()
    begin = max(worker.ended[warm - 1] for worker in run.workers)
    end = run.clock.now
    if end <= begin:
        raise ValueError(f"rounds must be more, and they are {rounds}: no worker was always warm")
    busy = sum(_within(one, begin, end) for worker in run.workers for one in worker.computed)
    done = sum(1 for worker in run.workers for t in worker.ended if begin < t <= end)
    carried = max(sum(_within(one, begin, end) for one in link.carried) for link in run.served)
    span = end - begin
    count = len(run.workers)
    return Simulation(busy / count / span, span * count / max(1, done), carried / span)


def _within(interval: tuple[float, float], begin: float, end: float) -> float:
    return max(0.0, min(interval[1], end) - max(interval[0], begin))


class _Clock:
    """Events in the order of their time, and of their making where that is the same."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._made = 0

    def at(self, time: float, then: Then) -> None:
        heappush(self._events, (time, self._made, then))
        self._made += 1

    def next(self) -> None:
        self.now, _, then = heappop(self._events)
        then()


class _Link:
    """One piece at a time, first in, first out."""

    def __init__(self, clock: _Clock, bandwidth: float) -> None:
        self._clock, self._bandwidth, self._free = clock, bandwidth, 0.0
        self.carried: list[tuple[float, float]] = []

    def carry(self, size: float, then: Then) -> None:
        if self._bandwidth == inf:
            then()
            return
        begin = max(self._clock.now, self._free)
        self._free = begin + size / self._bandwidth
        self.carried.append((begin, self._free))
        self._clock.at(self._free, then)


class _Worker:
    """A loop of pulls, computing and pushes; what of them has ended, and when."""

    def __init__(self, run: _Run, rank: int) -> None:
        self._run, self._rank = run, rank
        self._own = run.pair(run.cluster.worker)
        self.computed: list[tuple[float, float]] = []
        self.ended: list[float] = []
        self._pulled = self._pushed = 0  # rounds
        self._computing = False

    def start(self) -> None:
        self._transfer(self._on_pulled, push=False)

    def _on_pulled(self) -> None:
        self._pulled += 1
        self._compute()

    def _on_pushed(self) -> None:
        self._pushed += 1
        if self._run.cluster.pipelined:
            self._compute()
        else:
            self._transfer(self._on_pulled, push=False)

    def _compute(self) -> None:
        done = len(self.ended)
        if self._computing or self._pulled <= done or self._pushed < done - 1:
            return
        self._computing = True
        begin, takes = self._run.clock.now, self._run.computing()
        self.computed.append((begin, begin + takes))
        self._run.clock.at(begin + takes, self._on_computed)
        if self._run.cluster.pipelined:
            self._transfer(self._on_pulled, push=False)

    def _on_computed(self) -> None:
        self._computing = False
        self.ended.append(self._run.clock.now)
        self._transfer(self._on_pushed, push=True)
        if self._run.cluster.pipelined:
            self._compute()

    def _transfer(self, then: Then, *, push: bool) -> None:
        """Send all shards, piece by piece; `then` is called when the last is there."""
        shards = self._run.shards
        left = len(shards) * PIECES

        def arrived() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        for _ in range(PIECES):
            for offset in range(len(shards)):
                at = (self._rank + offset) % len(shards)
                ways = (self._own[push], self._run.links[at][push])
                self._send(ways if push else ways[::-1], shards[at] / PIECES, arrived)

    def _send(self, ways: Sequence[_Link], size: float, arrived: Then) -> None:
        first, second = ways
        first.carry(size, lambda: second.carry(size, arrived))


class _Run:
    """All of them."""

    def __init__(
        self, cluster: Cluster, servers: int, rounds: int, jitter: float, rng: random.Random
    ) -> None:
        self.cluster, self.clock = cluster, _Clock()
        self._rounds, self._jitter, self._rng = rounds, jitter, rng
        largest = cluster.largest_share(servers)
        rest = (1 - largest) / (servers - 1) if servers > 1 else 0.0
        self.shards = [cluster.parameters * one for one in [largest] + [rest] * (servers - 1)]
        self.links = [self.pair(cluster.server) for _ in range(servers)]
        self.served = {id(link): link for pair in self.links for link in pair}.values()
        self.workers = [_Worker(self, rank) for rank in range(cluster.workers)]

    def pair(self, bandwidth: float) -> tuple[_Link, _Link]:
        """Return the links for pulls and for pushes, the same one unless it is duplex."""
        link = _Link(self.clock, bandwidth)
        return (link, _Link(self.clock, bandwidth)) if self.cluster.duplex else (link, link)

    def computing(self) -> float:
        """Draw the seconds of a round's computing."""
        return self.cluster.compute * self._rng.uniform(1 - self._jitter, 1 + self._jitter)

    def until_one_is_ready(self) -> None:
        for worker in self.workers:
            self.clock.at(self._rng.uniform(0, self.cluster.compute), worker.start)
        while all(len(worker.ended) < self._rounds for worker in self.workers):
            self.clock.next()
