"""A model, a loss, a batch and an observer that fail wherever they are told to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset
from torch.utils.hooks import RemovableHandle

Result = TypeVar("Result")

N = 7
MICRO_BATCH = 3
"""Lanes of 3, 3 and a single sample."""


def alone(step: Callable[[], Result]) -> Result:
    """Run a step that a traced signal interrupts, and return what it does.

    A signal at the last line of an ``except`` leaves its exception for the thread, and all later
    errors of the process seem to come of it. In a generator it is the generator's, and ends here.
    """
    return next(step() for _ in range(1))


NO_BACKWARD = -1
"""What torch returns as the number of a backward while none runs."""


def in_backward(module: nn.Module, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    """Have `hook` see what flows back to each output of a module; one on a parameter fires once.

    It does not see a backward without data: what is raised there is a doubt, and no error.
    """

    def observe(gradient: Tensor) -> Any:
        return None if backward_without_data() else hook(gradient)

    def watched(_module: nn.Module, _inputs: Any, outputs: Tensor) -> None:
        if outputs.requires_grad:
            outputs.register_hook(observe)

    return module.register_forward_hook(watched)


def backward_without_data() -> bool:
    """Say whether a backward runs on tensors without data, which only asks what it calls."""
    modes = _get_current_dispatch_mode_stack()
    fake = any(isinstance(mode, FakeTensorMode) for mode in modes)
    return fake and torch._C._current_graph_task_id() != NO_BACKWARD


def unwalked(value: Result) -> Callable[[], Result]:
    """Return a function that returns a value, held where no walk of a model's state looks.

    A fault is none of the model's: a count of its calls must be neither compared nor restored.
    """

    def held() -> Iterator[Result]:
        while True:
            yield value

    return held().__next__


class Faults:
    """Counts how often each place is come by, and raises an error at one of them.

    What is out of memory stays so: the engine tries again, smaller, until it gives up.
    """

    def __init__(self) -> None:
        calls: Counter[str] = Counter()
        self._state = unwalked(SimpleNamespace(calls=calls, place="", call=0, error=None))

    @property
    def calls(self) -> Counter[str]:
        found: Counter[str] = self._state().calls
        return found

    def __deepcopy__(self, memo: Any) -> Faults:
        return self

    def arm(self, place: str, call: int, error: BaseException) -> None:
        """Raise `error` at the call with this number of a place; the first is 0."""
        self.calls.clear()
        vars(self._state()).update(place=place, call=call, error=error)

    def disarm(self) -> None:
        self._state().error = None

    def at(self, place: str) -> None:
        """Come by a place; what a backward without data raises is a doubt, and no error."""
        if backward_without_data():
            return
        state, call = self._state(), self.calls[place]
        self.calls[place] += 1
        if state.error is None or place != state.place:
            return
        if call == state.call or (call > state.call and self.lasts):
            raise state.error

    @property
    def lasts(self) -> bool:
        return isinstance(self._state().error, torch.OutOfMemoryError)


class Fails(nn.Module):
    """Three normalisations, and a place before, between and behind them in both directions.

    It draws from all dice, and uses nothing of what it draws. `again` lets it compute a part again
    in backward, where torch alone moves the running statistics again.
    """

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults, self.again = faults, True
        self.first, self.mid, self.inner = nn.Linear(5, 40), nn.Linear(40, 40), nn.Linear(40, 40)
        self.one, self.two, self.three = (nn.BatchNorm1d(40) for _ in range(3))
        self.last = nn.Linear(40, 3)
        self.mid.register_full_backward_hook(lambda *_: faults.at("hook of a module"))
        self.inner.weight.register_hook(lambda _: faults.at("hook of a parameter"))

    def forward(self, x: Tensor) -> Tensor:
        """[n, 5] -> [n, 3]."""
        at = self.faults.at
        _ = torch.rand(()), random.random(), np.random.rand()
        at("forward before")
        h = self.one(self.first(x))
        at("forward between")
        h = self.hooked(h, "backward between")
        with saved_tensors_hooks(self.pack, self.unpack):
            h = self.mid(h).tanh()
        h = checkpoint(self.part, h, use_reentrant=False) if self.again else self.part(h)
        at("forward behind")
        return self.hooked(self.last(self.three(h)), "backward before")

    def part(self, h: Tensor) -> Tensor:
        h = self.two(self.inner(h))
        again = torch._C._current_graph_task_id() != NO_BACKWARD
        self.faults.at("computed again" if again else "computed once")
        return F.relu(h, inplace=True)

    def hooked(self, h: Tensor, place: str) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda _: self.faults.at(place))
        return h

    def pack(self, tensor: Tensor) -> Tensor:
        self.faults.at("pack")
        return tensor.detach().clone()

    def unpack(self, tensor: Tensor) -> Tensor:
        self.faults.at("unpack")
        return tensor


class Items(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are loaded one by one."""

    def __init__(self, faults: Faults, x: Tensor, y: Tensor) -> None:
        self.faults, self.x, self.y = faults, x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.faults.at("data")
        return self.x[index], self.y[index]


def loss_of(faults: Faults, *, coupled: bool) -> Any:
    """Return a loss that comes by a place wherever it is computed, not where it is looked at."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # nor is the question seen
            looked_at = out.is_meta
        if not looked_at:
            faults.at("loss")
        return F.cross_entropy(out - out.mean(0) if coupled else out, y)

    return loss
