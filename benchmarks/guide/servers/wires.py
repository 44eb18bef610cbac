"""Network namespaces on one machine: one for every server and worker, and one for a bridge.

    server 0 ==tbf== | bridge | ==== worker 0         tbf: a token bucket on each end of the wire
    server 1 ==tbf== |        | ==== worker 1

Nothing of the machine's own network is touched, and all of it is gone at the end.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

BURST = 16 * 1024
"""Bytes that a bucket holds."""
QUEUE = 1 << 20
"""Bytes that wait for it."""


@dataclass(frozen=True)
class Wires:
    """Namespaces by their name's end, and the address of each."""

    prefix: str
    addresses: dict[str, str]

    def command(self, node: str) -> list[str]:
        """The words before a command that is to run in a node's namespace."""
        return ["ip", "netns", "exec", f"{self.prefix}-{node}"]


def _ip(*words: str) -> None:
    """Run a command of iproute2.

    Raises:
        OSError: it is not there, or the kernel refuses.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def wired(rates: dict[str, float | None]) -> Iterator[Wires]:
    """Join nodes by wires of so many bits a second each way; None is not shaped.

    Raises:
        OSError: the kernel refuses namespaces, wires or buckets.
    """
    prefix = f"anyb{os.getpid()}"
    wires = Wires(prefix, {node: f"10.99.0.{at}" for at, node in enumerate(rates, 1)})
    made: list[str] = []
    try:
        hub = f"{prefix}-hub"
        _ip("ip", "netns", "add", hub)
        made.append(hub)
        _ip("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("ip", "-n", hub, "link", "set", "bridge", "up")
        for at, (node, rate) in enumerate(rates.items()):
            name, wire = f"{prefix}-{node}", f"wire{at}"
            _ip("ip", "netns", "add", name)
            made.append(name)
            ends = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("ip", "-n", hub, "link", "add", wire, *ends)
            _ip("ip", "-n", hub, "link", "set", wire, "master", "bridge", "up")
            _ip("ip", "-n", name, "address", "add", f"{wires.addresses[node]}/24", "dev", "eth0")
            _ip("ip", "-n", name, "link", "set", "eth0", "up")
            idle = "net.ipv4.tcp_slow_start_after_idle=0"
            _ip(*wires.command(node), "sysctl", "-q", "-w", idle)
            if rate is not None:
                _shape(hub, wire, rate)
                _shape(name, "eth0", rate)
        yield wires
    finally:
        for name in reversed(made):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _shape(namespace: str, device: str, rate: float) -> None:
    bucket = ("tbf", "rate", f"{rate:.0f}bit", "burst", str(BURST), "limit", str(QUEUE))
    _ip("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)
