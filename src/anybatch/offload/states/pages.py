"""Pages of parameters and gradients in bounded memory: evicted, and prefetched before use.

A tensor retains its storage, and the storage frees its memory (`anybatch.memory.hold`), so views
that autograd has saved, tied weights and references remain valid. Before a kernel runs, the tensors
that it reads are made resident; those with the latest next use are evicted (Belady's rule, by the
order of the step before, in the first step the least recently used), without a write if their copy
is still valid.

Source: Hayakawa and Narihira, Out-of-core training, section 3; Belady (1966).
"""

from __future__ import annotations

from typing import Any

from anybatch.core.units import show_bytes
from anybatch.errors import BudgetError
from anybatch.memory.hold import EVICTING, OFFLOADED, PREFETCHING, RESIDENT, Held, Hold
from anybatch.offload.states.order import Order
from anybatch.offload.states.placeholder import state_errors

WINDOW = 256
"""Number of future uses that are considered."""


class Pages:
    """Keeps storages within a number of bytes.

    Args:
        hold: moves them.
        limit: bytes that may be in memory at a time.
        small: bytes below which a storage is not offloaded.

    Attributes:
        limit: those bytes.
        most: the most bytes that were here at a time.
        fixed: bytes of those that are pinned, because their address was read.
    """

    def __init__(self, hold: Hold, limit: int, small: int) -> None:
        self.limit, self.most, self.fixed = limit, 0, 0
        self._hold, self._small, self._order = hold, small, Order()
        self._clock = self._front = 0
        hold.since = 1 << 62  # no lane ever gets there: none of its own is held back

    @property
    def moved(self) -> int:
        """Bytes that were copied out and in."""
        return self._hold.moved

    @property
    def here(self) -> int:
        """Bytes that are here now."""
        return self._hold.here + self.fixed

    def has(self, key: int) -> bool:
        """Return whether a storage is registered, resident or offloaded."""
        return key in self._hold.all

    def fit(self, accesses: list[tuple[int, bool]]) -> bool:
        """Say whether storages may be here together."""
        sizes = {key: self._hold.all[key].size for key, _ in accesses if key in self._hold.all}
        return sum(sizes.values()) + self.fixed <= self.limit

    def add(self, key: int, storage: Any, role: int, number: int) -> None:
        """Take in a storage that is here, under a name that is the same in every step."""
        hold = self._hold
        with state_errors("written to"):
            if hold.stirred():
                hold.settle()
            size = storage.nbytes()
            if key in hold.all or size < self._small or not storage.resizable():
                return
            self._clock += 1
            self._free(hold.rounded(size), "a tensor")
            hold.add(key, storage, size, role, number, self._clock)
            self._note((role, number))

    def use(self, accesses: list[tuple[int, bool]], name: str) -> None:
        """Make storages be here, before a kernel runs on them.

        Args:
            accesses: keys of storages, and whether they are written to.
            name: of the kernel.

        Raises:
            BudgetError: all of them together are more than the limit.
        """
        hold = self._hold
        if hold.stirred():
            with state_errors("written to"):
                hold.settle()
        pages = [(key, hold.all[key], writes) for key, writes in accesses if key in hold.all]
        if not pages:
            return
        self._clock += 1
        for _, held, _ in pages:
            held.used = self._clock
        for key, held, writes in pages:
            if held.state != RESIDENT:
                self._bring(key, held, name)
            if writes and held.has_copy:
                with state_errors("written to"):
                    hold.forget_copy(key, held)
            self._note((held.lane, held.number))
        if self._front < len(self._order):
            with state_errors("written to"):
                self._prefetch()

    def keep(self, key: int) -> None:
        """Make a storage permanently resident, because its address was read."""
        self.use([(key, True)], "a read of its address")
        held = self._hold.all.get(key)
        if held is not None and not held.pinned:
            self._hold.pin(key, held)
            self.fixed += held.size

    def squeeze(self, limit: int) -> None:
        """Set the budget, and evict until the resident bytes are within it."""
        self.limit = limit
        self._clock += 1
        with state_errors("written to"):
            self._free(0, "what stays")

    def ended(self) -> None:
        """A step is over."""
        self._order.ended()
        self._front = 0

    def _bring(self, key: int, held: Held, name: str) -> None:
        if held.state == OFFLOADED:
            with state_errors("written to"):
                self._free(held.size, name)
        with state_errors("read from"):
            self._hold.bring_back(key, held)

    def _note(self, item: tuple[int, int]) -> None:
        self.most = max(self.most, self._hold.here + self.fixed)
        self._order.used(item)

    def _free(self, size: int, name: str) -> None:
        """Evict until so many bytes fit in the budget."""
        hold = self._hold
        while self._over(size) > hold.going and self._evict(-1):
            pass
        while self._over(size) > 0 and hold.wait():
            pass
        if self._over(size) > 0 and (size or self._over(0) > 0):
            needed = hold.here + self.fixed + size
            raise BudgetError(
                f"the parameters and gradients that a kernel reads must fit in memory, and {name} "
                f"needs {show_bytes(needed)} at once, and {show_bytes(self.limit)} is reserved: "
                f'give memory="{-(-needed // 1024)}KiB" or more for them, or have fewer read at a '
                "time",
                needed=needed,
                budget=self.limit,
            )

    def _over(self, size: int) -> int:
        return self._hold.here + self.fixed + size - self.limit

    def _evict(self, beyond: int) -> bool:
        """Evict the storage of latest next use, if beyond a place; return whether one was."""
        hold, order = self._hold, self._order
        if hold.stirred():  # what has died cannot leave
            hold.settle()
        best, last = None, (beyond, 0)
        for key, held in hold.movable.items():
            if held.used < self._clock and held.state in (RESIDENT, PREFETCHING):
                later = order.next((held.lane, held.number)), -held.used
                if later[0] > beyond and (best is None or later > last):
                    best, last = (key, held), later
        if best is None:
            return False
        hold.evict(*best)
        return True

    def _prefetch(self) -> None:
        """Prefetch the storages used next, while they fit or later ones can be evicted."""
        hold, order = self._hold, self._order
        self._front = max(self._front, order.at)
        while self._front < min(len(order), order.at + WINDOW):
            found = hold.find(*order[self._front])
            if found is not None and found[1].state == OFFLOADED:
                size = found[1].size
                while self._over(size) > hold.going and self._evict(self._front):
                    pass
                if self._over(size) > 0:
                    return
                hold.call(*found)
                self.most = max(self.most, hold.here + self.fixed)
            elif found is not None and found[1].state == EVICTING:
                hold.bring_back(*found)
            self._front += 1
