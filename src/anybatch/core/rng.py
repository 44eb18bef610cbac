"""Snapshot and restore of the RNG state of every global generator that a forward may draw from.

``torch.random.fork_rng`` covers only torch. Models also draw from ``random`` and ``numpy.random``
(stochastic depth, augmentation), and a second pass over a micro-batch must make the same draws.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anybatch.core.accelerator import States, of
from anybatch.core.accelerators import put_random_states, random_states
from anybatch.core.generators import memory


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
