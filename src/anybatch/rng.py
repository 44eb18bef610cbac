"""The same dice: the state of every global random generator that a forward pass may draw from.

``torch.random.fork_rng`` covers torch alone. Models also draw from ``random`` and ``numpy.random``
(stochastic depth, augmentation), and a second pass over a micro-batch must meet the same draws.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Dice:
    """The state of torch's, Python's and numpy's global generators at one moment."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls) -> Dice:
        """Return the state as it is, without drawing."""
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        return cls(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state())

    def same_as(self, other: Dice) -> bool:
        """Say whether nothing was drawn between the two moments."""
        mine, theirs = self.numpy, other.numpy
        return (
            torch.equal(self.cpu, other.cpu)
            and len(self.cuda) == len(other.cuda)
            and all(map(torch.equal, self.cuda, other.cuda))
            and self.python == other.python
            and mine[2:] == theirs[2:]
            and np.array_equal(mine[1], theirs[1])
        )

    def put_back(self) -> None:
        """Make this state the present one."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
        random.setstate(self.python)
        np.random.set_state(self.numpy)
