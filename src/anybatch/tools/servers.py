"""How many parameter servers hide the traffic of asynchronous workers behind their computing.

In a round a worker pulls all parameters and pushes all updates, 2 S_p bytes, while it computes for
T_C. The traffic of N_w workers is divided among N_ps servers, each of bandwidth B_ps:

    worker   |  compute  |  compute  |        hidden as long as
    servers  | pull push | pull push |            T_C >= 2 S_p N_w / (N_ps B_ps)

Three things are beyond the lemma. A worker's own link carries 2 S_p bytes a round, and no number
of servers makes it faster. A server that holds the largest share of the parameters, because one
tensor is not divided or the load is not even, has more traffic than the others. And a loop that
does not pull ahead waits for all of it: T = T_C + T_io.

Utilisation is T_C over the seconds of a round. Here it is that of a fluid: traffic that flows
evenly. Real transfers queue, so it is an upper bound (`benchmarks.simulators.parameter_servers`).

Source: guide, Lemma 3.2, Equations 7 and 8, and the three measures of section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

from anybatch.tools.validation import ROUNDING, positive, positive_integer, share


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

        Raises:
            ValueError: it is out of range.

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
