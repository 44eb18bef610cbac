"""Bytes of the draws of a forward, from which a plan forecasts full-batch draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.execution.full_batch_rng.kernels import Draw, category_of


class Weighing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note the bytes that each draw takes while it is made.

    Attributes:
        bytes: of the draws, in order.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: list[int] = []

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one kernel."""
        kwargs, category = kwargs or {}, category_of(func)
        if category not in ("", "unknown"):
            self.bytes.append(Draw(func, args, kwargs, category).bytes())
        return func(*args, **kwargs)


def largest_draw(found: Sequence[Sequence[int]], counts: Sequence[int], size: int) -> int:
    """Return the bytes of the largest draw of `size` samples, from those at a few.

    Args:
        found: bytes of the draws of a forward, at each number of samples.
        counts: these numbers.
        size: N_B.
    """
    lines = list(zip(*found, strict=False))
    if len({len(one) for one in found}) > 1 or len(counts) < 2:  # another path: the most there is
        each = max((-(-max(one, default=0) // n) for one, n in zip(found, counts, strict=True)))
        return each * size
    (low, *_, high), most = counts, 0
    for few, *_, many in lines:
        if many > few:  # else it is the same for all samples, and every one has it
            slope = -(-(many - few) // (high - low))
            most = max(most, many + slope * max(0, size - high))
    return most
