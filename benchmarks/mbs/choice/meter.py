"""Live tensor bytes of a step, and a limit on them that raises what a full machine raises.

A CPU has no counter of the bytes that tensors hold, and no limit on them, yet every finder has
to meet the same one. The trick: a dispatch mode sees every result of every operation. It adds a
storage's bytes when the storage is first seen and takes them off when the storage dies, which
a weak reference tells. Past the budget it raises the message of torch's own CPU allocator,
which Lightning's and Accelerate's finders both know as out of memory.

Counted: parameters, buffers, gradients, and all that the step makes. Not counted: the batch,
and what a kernel takes and gives back inside one operation. The unit is that of the design, 5.5.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.mbs.problem import Problem

FULL = "DefaultCPUAllocator: can't allocate memory"
MESSAGE = FULL + ": {} bytes are live, the budget is {}"


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live bytes, `peak` being the most so far; raises past `budget` if there is one."""

    def __init__(self, problem: Problem, budget: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.budget = budget
        self.live = self.peak = 0
        self._held: dict[int, weakref.ref[Any]] = {}
        state = [*problem.model.parameters(), *problem.model.buffers()]
        grads = [parameter.grad for parameter in state if parameter.grad is not None]
        for tensor in (*state, *grads):
            self._add(tensor)
        for tensor in _tensors((problem.inputs, problem.targets)):
            self._add(tensor, counted=False)

    def _add(self, tensor: Tensor, *, counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if counted else 0
        if key in self._held:
            return
        self._held[key] = weakref.ref(storage, self._leaver(key, size))
        self.live += size
        self.peak = max(self.peak, self.live)
        if self.budget is not None and self.live > self.budget:
            raise RuntimeError(MESSAGE.format(self.live, self.budget))

    def _leaver(self, key: int, size: int) -> Callable[[Any], None]:
        def release(_: Any) -> None:
            del self._held[key]
            self.live -= size

        return release

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in _tensors(found):
            self._add(tensor)
        return found


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        yield from _tensors(tuple(tree.values()))
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from _tensors(value)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error is the one that a meter, or a full CPU, raises."""
    return isinstance(error, RuntimeError) and FULL in str(error)
