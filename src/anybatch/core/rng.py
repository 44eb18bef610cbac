"""Snapshot, restore and change detection of the RNG state of every global generator.

``torch.random.fork_rng`` covers only torch. Models also draw from ``random`` and ``numpy.random``
(stochastic depth, augmentation), and a second pass over a micro-batch must make the same draws.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anybatch.core.accelerator import States, of
from anybatch.core.accelerators import put_random_states, random_states


class RNGState(NamedTuple):
    """The state of torch's, Python's and numpy's global generators at one moment.

    Args:
        cpu: of torch's on the host.
        devices: names of devices, and the states of theirs.
        python: of the module ``random``.
        numpy: of ``numpy.random``.
    """

    cpu: Tensor
    devices: States
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls) -> RNGState:
        """Return the state as it is, without drawing."""
        return cls(torch.get_rng_state(), random_states(), *_host())

    def same_as(self, other: RNGState) -> bool:
        """Return whether nothing was drawn between this moment and `other`."""
        return (
            torch.equal(self.cpu, other.cpu)
            and len(self.devices) == len(other.devices)
            and all(
                name == its_name and torch.equal(state, its)
                for (name, state), (its_name, its) in zip(self.devices, other.devices, strict=True)
            )
            and self.others_as(other)
        )

    def others_as(self, other: RNGState) -> bool:
        """Return whether nothing but torch has drawn between this moment and `other`."""
        mine, theirs = self.numpy, other.numpy
        python = self.python is other.python or self.python == other.python
        return python and (mine is theirs or _parts(mine) == _parts(theirs))

    def put_back(self) -> None:
        """Make this state the present one."""
        self._put_host()
        put_random_states(self.devices)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and texts, which ``torch.load`` reads safely."""
        algorithm, keys, position, has_normal, normal = self.numpy
        words = torch.from_numpy(np.asarray(keys, np.int64))
        return {
            "torch": self.cpu,
            "devices": list(self.devices),
            "python": self.python,
            "numpy": (str(algorithm), words, int(position), int(has_normal), float(normal)),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> RNGState:
        """Return the state that `to_dict` wrote, maybe on another machine.

        Args:
            state: what it returned; accelerators of a type are left out where there are more of
                them here, or fewer.
        """
        states = [(name, found) for name, found in state["devices"]]
        number = Counter(of(name).type for name, _ in states)
        version, words, normal = state["python"]
        algorithm, keys, *rest = state["numpy"]
        return cls(
            cpu=state["torch"],
            devices=tuple(one for one in states if number[of(one[0]).type] == of(one[0]).count),
            python=(version, tuple(words), normal),
            numpy=(algorithm, keys.numpy().astype(np.uint32), *rest),
        )

    @classmethod
    def on(cls, devices: Sequence[torch.device]) -> RNGState:
        """Return the state as another process may put it on: of the host, and of `devices`."""
        states = tuple((str(device), of(device).random_state(device)) for device in devices)
        return cls.now()._replace(devices=states)

    def put_on(self, devices: Sequence[torch.device]) -> None:
        """Restore a state of `on` as the current one, with its devices' state for `devices`."""
        self._put_host()
        for device, (_, state) in zip(devices, self.devices, strict=True):
            of(device).put_random_state(state, device)

    def checksum(self) -> int:
        """Return a checksum of 32 bits of a state."""
        check = zlib.crc32(repr((self.python, _parts(self.numpy))).encode())
        for part in (self.cpu, *(state for _, state in self.devices)):
            check = zlib.crc32(part.cpu().numpy().tobytes(), check)
        return check

    def _put_host(self) -> None:
        torch.set_rng_state(self.cpu)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


def _parts(state: Any) -> Any:
    """Return a numpy RNG state in comparable form; each type of generator has its own format."""
    if isinstance(state, dict):
        return {key: _parts(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_parts, state))
    return state.tobytes() if isinstance(state, np.ndarray) else state


def torch_state() -> tuple[Tensor, ...]:
    """Return the state of torch's generators: of the host, and of each accelerator in use."""
    return (torch.get_rng_state(), *(state for _, state in random_states()))


def _host() -> tuple[tuple[Any, ...], Any]:
    """Return the state of Python's and numpy's generators.

    Reading it is slow, and done only if their memory has changed since the last time.
    """
    before = memory()
    if before is not None and _CACHED and _CACHED[0][0] == before:
        return _CACHED[0][1]
    states = random.getstate(), np.random.get_state()
    if before is not None and memory() == before:  # nobody drew meanwhile
        _CACHED[:] = [(before, states)]
    return states


_CACHED: list[tuple[Any, tuple[tuple[Any, ...], Any]]] = []
"""Their memory and their state at the last read; at most one."""


# Whether Python's or numpy's global generator has moved: by its memory, without asking for it.
#
# Both return their state as hundreds of numbers, which is slow, and a step reads it at its
# beginning and for each micro-batch. The state is a few kilobytes of memory. numpy has a public
# address for its words; the addresses of Python's, and of numpy's normal number that was drawn in
# advance, are found with generators of our own when this module is imported. If one is not found,
# callers must compare the state itself.
#
#     Random        │ head │ place │ 624 words │            found by its state
#     MT19937       │ 624 words │ place │                   ctypes.state_address
#     RandomState   │ ... │ has_gauss │ gauss │ ...         found by drawing one

WORDS = 624
"""The state of a Mersenne twister: so many words of 32 bits, and the place of the next draw."""

TWISTER = 4 * WORDS + 4
"""Its bytes."""

TWISTER_BYTES = ctypes.c_char * TWISTER

GAUSS = 16
"""Bytes of a flag, and of the normal number that was drawn in advance if it is set."""

PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
"""Python's global generator."""

PYTHON_LIES = id(PYTHON) + object.__basicsize__

NUMPY: Any = getattr(np.random.get_state, "__self__", None)
"""numpy's global generator, whose bits another one may make."""

BITS: Any = getattr(np.random, "get_bit_generator", None)
"""Returns that one; missing in old versions of numpy."""


def memory() -> tuple[bytes, bytes, bytes, Any] | None:
    """Return the memory contents of both generators; None where these cannot be located.

    A normal number that Python has drawn in advance is an attribute, and comes last.
    """
    bits = BITS() if LOCATED else None
    if not isinstance(bits, np.random.MT19937):
        return None
    words = TWISTER_BYTES.from_address(bits.ctypes.state_address)
    return words.raw, GAUSS_NOW.raw, PYTHON_NOW.raw, PYTHON.gauss_next


def _python_located() -> bool:
    """Say whether Python's generator lies where `memory` reads it."""
    if type(PYTHON).__basicsize__ - object.__basicsize__ < TWISTER:
        return False
    *words, place = PYTHON.getstate()[1]
    there = np.array([place, *words], dtype=np.uint32).tobytes()
    return ctypes.string_at(PYTHON_LIES, TWISTER) == there


def _gauss_at() -> int | None:
    """Return how far into a generator of numpy's the number lies that was drawn in advance."""
    one = np.random.RandomState(0)
    size = type(one).__basicsize__

    def there() -> bytes:
        return ctypes.string_at(id(one), size)

    none = there()
    one.standard_normal()  # makes two
    after, gauss = there(), one.get_state(legacy=False)["gauss"]
    one.standard_normal()
    used, expected = there(), struct.pack("d", gauss)
    for at in range(object.__basicsize__, size - GAUSS + 1, 8):
        flags = [struct.unpack_from("i", state, at)[0] for state in (none, after, used)]
        if flags == [0, 1, 0] and after[at + 8 : at + GAUSS] == expected:
            return at
    return None


def _located() -> bool:
    there = isinstance(NUMPY, np.random.RandomState) and BITS is not None
    return there and sys.implementation.name == "cpython" and _python_located()


_AT = _gauss_at() if _located() else None
LOCATED = _AT is not None
"""Whether the address was found."""
GAUSS_NOW = (ctypes.c_char * GAUSS).from_address(id(NUMPY) + (_AT or 0))
PYTHON_NOW = TWISTER_BYTES.from_address(PYTHON_LIES)
