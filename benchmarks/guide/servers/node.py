"""One parameter server, or one worker, as a program: sockets, threads and sleeps, nothing else.

A server sends a shard (pull) or takes one (push), one at a time in the order in which it was asked;
with `--duplex` one of each at a time. A worker computes by sleeping; it pulls the next parameters
and pushes the last updates meanwhile, or waits for both with `--waits`.
"""

import argparse
import json
import random
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic, sleep

PORT = 4000
BUFFER = 1 << 16
"""Bytes that a socket takes before they are sent: little, so that a lock is held while they are."""
PULL, PUSH, GO, DONE = b"P", b"U", b"g", b"d"


def receive(link: socket.socket, size: int) -> None:
    """Read so many bytes."""
    while size:
        got = len(link.recv(min(size, BUFFER)))
        if not got:
            raise ConnectionError("the other side is gone")
        size -= got


def serve(address: str, *, duplex: bool) -> None:
    """Take connections until this process is ended."""
    one = threading.Lock()
    locks = {PULL: one, PUSH: threading.Lock() if duplex else one}
    with socket.create_server((address, PORT), backlog=64) as door:
        print("ready", flush=True)
        while True:
            link, _ = door.accept()
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_answer, args=(link, locks), daemon=True).start()


def _answer(link: socket.socket, locks: dict[bytes, threading.Lock]) -> None:
    direction = link.recv(1)
    size = int.from_bytes(link.recv(8, socket.MSG_WAITALL))
    shard = bytes(size)
    while link.recv(1) == GO:
        with locks[direction]:
            if direction == PULL:
                link.sendall(shard)
            else:
                link.sendall(GO)
                receive(link, size)
                link.sendall(DONE)
                continue
            receive(link, 1)  # it is there


class Shard:
    """The connections of a worker to one server, and a thread for each."""

    def __init__(self, address: str, size: int) -> None:
        self._data = bytes(size)
        self._links = {direction: self._connect(address, direction) for direction in (PULL, PUSH)}
        self._threads = {direction: ThreadPoolExecutor(1) for direction in (PULL, PUSH)}

    def _connect(self, address: str, direction: bytes) -> socket.socket:
        link = socket.create_connection((address, PORT), timeout=60)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(direction + len(self._data).to_bytes(8))
        return link

    def start(self, direction: bytes) -> "Future[None]":
        """Begin to pull or to push it."""
        return self._threads[direction].submit(self._pull if direction == PULL else self._push)

    def _pull(self) -> None:
        link = self._links[PULL]
        link.sendall(GO)
        receive(link, len(self._data))
        link.sendall(DONE)

    def _push(self) -> None:
        link = self._links[PUSH]
        link.sendall(GO)
        receive(link, 1)
        link.sendall(self._data)
        receive(link, 1)


def work(
    shards: list[Shard], compute: Callable[[], float], rounds: int, *, waits: bool
) -> list[tuple[float, float]]:
    """Return when each round's computing began and ended."""
    found: list[tuple[float, float]] = []
    pulls = [shard.start(PULL) for shard in shards]
    before: list[Future[None]] = []
    pushes: list[Future[None]] = []
    for _ in range(rounds):
        for one in (*pulls, *before):
            one.result(60)
        begin = monotonic()
        if not waits:
            pulls = [shard.start(PULL) for shard in shards]
        sleep(compute())
        found.append((begin, monotonic()))
        before, pushes = pushes, [shard.start(PUSH) for shard in shards]
        if waits:
            for one in pushes:
                one.result(60)
            pulls = [shard.start(PULL) for shard in shards]
    for one in (*pulls, *pushes):
        one.result(60)
    return found


def main() -> None:
    """Be a server or a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["server", "worker"])
    parser.add_argument("--at", default="")
    parser.add_argument("--duplex", action="store_true")
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--shards", default="{}", help="address -> bytes, JSON")
    parser.add_argument("--compute", type=float, default=0.0)
    parser.add_argument("--jitter", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.role == "server":
        serve(arguments.at, duplex=arguments.duplex)
        return
    rng = random.Random(arguments.seed)
    shards = [Shard(at, size) for at, size in json.loads(arguments.shards).items()]
    print("ready", flush=True)
    sys.stdin.readline()  # all are
    sleep(rng.uniform(0, arguments.compute))

    def compute() -> float:
        return float(arguments.compute * rng.uniform(1 - arguments.jitter, 1 + arguments.jitter))

    print(json.dumps(work(shards, compute, arguments.rounds, waits=arguments.waits)), flush=True)


if __name__ == "__main__":
    main()
