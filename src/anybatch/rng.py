"""The same dice: the state of every global random generator that a forward pass may draw from.

``torch.random.fork_rng`` covers torch alone. Models also draw from ``random`` and ``numpy.random``
(stochastic depth, augmentation), and a second pass over a micro-batch must meet the same draws.
"""

from __future__ import annotations

import ctypes
import random
import sys
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Dice(NamedTuple):
    """The state of torch's, Python's and numpy's global generators at one moment.

    Attributes:
        memory: the bytes that Python's and numpy's generators lie in; None where it is not known.
    """

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    python: tuple[Any, ...]
    numpy: Any
    memory: bytes | None = None

    @classmethod
    def now(cls) -> Dice:
        """Return the state as it is, without drawing."""
        state = np.random.get_state()
        return cls(torch.get_rng_state(), _cuda(), random.getstate(), state, _memory_if(state))

    def later(self) -> Dice:
        """Return the state as it is, some micro-batches after this one, at a tenth of the cost.

        Python and numpy are slow to tell their state, so they are asked only where the memory of
        their generators is another. A normal number that was drawn in advance lies elsewhere:
        numpy, where it has one, is asked anew.
        """
        drawn_in_advance = self.memory is not None and self.numpy[3]
        if self.memory is None or drawn_in_advance or _memory() != self.memory:
            return Dice.now()
        if self.python[2] != PYTHON.gauss_next:
            return Dice.now()
        return Dice(torch.get_rng_state(), _cuda(), self.python, self.numpy, self.memory)

    def same_as(self, other: Dice) -> bool:
        """Say whether nothing was drawn between the two moments."""
        return (
            torch.equal(self.cpu, other.cpu)
            and len(self.cuda) == len(other.cuda)
            and all(map(torch.equal, self.cuda, other.cuda))
            and self.others_as(other)
        )

    def others_as(self, other: Dice) -> bool:
        """Say whether nothing was drawn between the two moments but from torch."""
        mine, theirs = self.numpy, other.numpy
        return (
            self.python == other.python
            and mine[2:] == theirs[2:]
            and np.array_equal(mine[1], theirs[1])
        )

    def put_back(self) -> None:
        """Make this state the present one."""
        self._put_host()
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))

    @classmethod
    def on(cls, devices: Sequence[torch.device]) -> Dice:
        """Return the state as another process may put it on: of the host, and of CUDA `devices`."""
        cuda = tuple(torch.cuda.get_rng_state(device) for device in devices)
        return cls.now()._replace(cuda=cuda, memory=None)

    def put_on(self, devices: Sequence[torch.device]) -> None:
        """Make a state that came from `on` the present one, its devices' that of `devices`."""
        self._put_host()
        for device, state in zip(devices, self.cuda, strict=True):
            torch.cuda.set_rng_state(state, device)

    def checksum(self) -> int:
        """Return a number of 32 bits that tells one state from another."""
        name, words, *rest = self.numpy
        check = zlib.crc32(repr((self.python, name, rest)).encode())
        for part in (words, self.cpu.numpy(), *(state.cpu().numpy() for state in self.cuda)):
            check = zlib.crc32(part.tobytes(), check)
        return check

    def _put_host(self) -> None:
        torch.set_rng_state(self.cpu)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


def _cuda() -> tuple[Tensor, ...]:
    return tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]


WORDS = 624
"""The state of a Mersenne twister: so many words of 32 bits, and the place of the next draw."""


TWISTER = 4 * WORDS + 4
"""Its bytes."""

PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
"""Python's global generator; in memory, the place of the next draw stands before the words."""

PYTHON_LIES = id(PYTHON) + object.__basicsize__

NUMPY: Any = getattr(np.random, "get_bit_generator", None)
"""Returns numpy's global generator; old versions of numpy do not tell."""


def _memory() -> bytes | None:
    """Return the memory of Python's and numpy's generators; None where they lie otherwise."""
    generator = NUMPY() if KNOWN else None
    if not isinstance(generator, np.random.MT19937):
        return None
    numpy = ctypes.string_at(generator.ctypes.state_address, TWISTER)
    return numpy + ctypes.string_at(PYTHON_LIES, TWISTER)


def _memory_if(state: Any) -> bytes | None:
    """Return that memory if it holds `state` of numpy, so that a draw cannot but change it."""
    memory = _memory()
    place = 4 * WORDS
    if memory is None or memory[place:TWISTER] != _bytes([int(state[2])]):
        return None
    return memory if memory[:place] == state[1].tobytes() else None


def _known() -> bool:
    """Say whether this interpreter keeps Python's generator where `_memory` reads it."""
    room = type(PYTHON).__basicsize__ - object.__basicsize__
    if NUMPY is None or sys.implementation.name != "cpython" or room < TWISTER:
        return False
    *words, place = PYTHON.getstate()[1]
    return ctypes.string_at(PYTHON_LIES, TWISTER) == _bytes([place, *words])


def _bytes(words: list[int]) -> bytes:
    return np.array(words, dtype=np.uint32).tobytes()


KNOWN = _known()
