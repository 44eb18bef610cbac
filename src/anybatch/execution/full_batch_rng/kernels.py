"""Kernels that draw, and how a micro-batch runs each of them for the full batch.

torch tags every kernel that may draw (``nondeterministic_seeded``), and composite ones (dropout,
attention, LSTM) are intercepted as their parts. The draw of an entry must depend only on the place
of the entry, or the rows of other micro-batches would be needed:

    written    bernoulli_, uniform_, normal_ ...     fill a tensor that is there
    sized      rand, randn, randint, normal          are given a size
    like       rand_like, bernoulli, multinomial     take shape or weights of a tensor
    normal     normal of means and deviations        take those of two
    dropout    native_dropout                        draw a mask and use it
    values     poisson, gamma, rrelu, randperm       the same for all samples, or refused
    unknown    whatever else may draw                refused if it moves the RNG
    stateful   recurrent layers of cuDNN             refused if their own RNG is on
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core.accelerator import of
from anybatch.core.accelerators import random_states
from anybatch.core.modules import DispatchMode, in_training
from anybatch.errors import NotExactError
from anybatch.execution.full_batch_rng.law import (
    Law,
    Pattern,
    RowRange,
    contiguous,
    empty,
    pattern_of,
)

CATEGORIES = {
    "written": "bernoulli_ uniform_ normal_ exponential_ random_ geometric_ cauchy_ log_normal_",
    "sized": "rand randn randint",
    "like": "rand_like randn_like randint_like bernoulli multinomial",
    "dropout": "native_dropout",
    "values": "poisson binomial _standard_gamma _sample_dirichlet randperm rrelu_with_noise "
    "rrelu_with_noise_",
}
CATEGORY = {
    f"aten::{name}": category for category, names in CATEGORIES.items() for name in names.split()
}

FORMS = {
    "sized": ("default", "low", "generator", "low_generator", "float_float"),
    "like": ("default", "p", "generator", "low_dtype", "low_generator_dtype"),
}
"""Overloads that are recognised; others, such as those with ``out=``, are not."""

OURS = ("aten", "prim", "prims", "profiler", "_c10d_functional", "c10d", "c10d_functional")
"""Where kernels come from that say whether they draw."""

STATEFUL = {"aten::_cudnn_rnn": "dropout", "aten::miopen_rnn": "dropout"}
"""Kernels with an RNG of their own, and the argument that switches it on."""


@cache
def category_of(func: Any) -> str:
    """Return how a kernel draws, in a word; "" for one that does not."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ""
    if schema.name.split("::")[0] not in OURS:
        return "unknown"
    if schema.name in STATEFUL:
        return "stateful"
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return ""
    overload = schema.overload_name or "default"
    if schema.name == "aten::normal":
        return {"float_float": "sized", "out": "unknown"}.get(
            overload, "unknown" if overload.endswith("_out") else "normal"
        )
    category = CATEGORY.get(schema.name, "unknown")
    overloads = FORMS.get(category, (overload,))
    return category if overload in overloads and not overload.endswith("out") else "unknown"


@dataclass
class Draw:
    """One call of a kernel that draws, of a category of the table above."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    category: str
    name: str = field(init=False)

    def __post_init__(self) -> None:
        schema: Any = self.func._schema  # type: ignore[attr-defined]
        self.name = schema.name.removeprefix("aten::")
        names = [argument.name for argument in schema.arguments]
        self._size = names.index("size") if "size" in names else 0

    @property
    def idle(self) -> bool:
        """Whether it draws nothing this time."""
        if self.category == "dropout":
            return self.args[2] is False or self.args[1] == 0
        return self.name.startswith("rrelu") and not (len(self.args) > 4 and self.args[4])

    @property
    def generator(self) -> bool:
        """Whether it draws from a generator among its arguments."""
        return any(isinstance(v, torch.Generator) for v in (*self.args, *self.kwargs.values()))

    @property
    def pattern(self) -> Pattern:
        """Shape and strides that decide how much is drawn."""
        if self.category == "sized":
            return contiguous(self.args[self._size])
        if self.name == "randperm":
            return contiguous(self.args[:1])
        if self.category == "normal":
            return contiguous(self._joined())
        tensor = self.args[0]
        if self.category == "like":  # a part of a tensor has strides that its likeness has not
            return pattern_of(torch.empty_like(tensor, device="meta"))
        return pattern_of(tensor)

    def plain(self) -> Any:
        """Draw as many numbers as are requested."""
        return self.func(*self.args, **self.kwargs)

    def draw_full(self, law: Law, full: Pattern, rows: RowRange) -> Any:
        """Draw for the full batch, and return the entries of `rows`.

        Args:
            law: layout of the samples; there are some.
            full: the pattern of the draw of the full batch.
            rows: those of this micro-batch.

        Memory: the full-batch draw is resident until this returns; "like" and "normal" have their
        arguments in addition.
        """
        return getattr(self, f"_{self.category}")(law, full, rows)

    def _written(self, law: Law, full: Pattern, rows: RowRange) -> Tensor:
        own: Tensor = self.args[0]
        rest = tuple(
            self._grown(value.expand(own.shape), law, full, rows)
            if isinstance(value, Tensor) and value.dim()
            else value
            for value in self.args[1:]
        )
        drawn = empty(full, own)
        self.func(drawn, *rest, **self.kwargs)
        return own.copy_(law.select(drawn, rows))

    def _sized(self, law: Law, full: Pattern, rows: RowRange) -> Tensor:
        args = list(self.args)
        args[self._size] = list(full.sizes)
        return _own(law.select(self.func(*args, **self.kwargs), rows))

    def _like(self, law: Law, full: Pattern, rows: RowRange) -> Tensor:
        own: Tensor = self.args[0]
        drawn = self.func(self._grown(own, law, full, rows), *self.args[1:], **self.kwargs)
        if self.name == "multinomial":
            return _own(law.select(drawn, rows))
        options = {k: v for k, v in self.kwargs.items() if k == "memory_format"}
        return torch.empty_like(own, dtype=drawn.dtype, **options).copy_(law.select(drawn, rows))

    def _normal(self, law: Law, full: Pattern, rows: RowRange) -> Tensor:
        shape = self._joined()
        args = [
            self._grown(a.expand(shape), law, full, rows) if isinstance(a, Tensor) else a
            for a in self.args
        ]
        return _own(law.select(self.func(*args, **self.kwargs), rows))

    def _dropout(self, law: Law, full: Pattern, rows: RowRange) -> tuple[Tensor, Tensor]:
        own, p = self.args[0], self.args[1]
        if not of(own.device).host and not _aligned(own, rows):
            raise NotExactError(
                "the draws of dropout on a GPU depend on the address of its input, which must be "
                "a tensor of its own, and it is a view into another tensor: give dropout a tensor "
                "of its own, such as x.clone()"
            )
        mask = self.func(empty(full, own).fill_(1), *self.args[1:], **self.kwargs)[1]
        own_mask = torch.empty_like(own, dtype=mask.dtype).copy_(law.select(mask, rows))
        return own * own_mask * (0.0 if p == 1 else 1 / (1 - p)), own_mask

    def _grown(self, own: Tensor, law: Law, full: Pattern, rows: RowRange) -> Tensor:
        """Return a tensor of the full batch: ones, with the micro-batch's values in place."""
        grown: Tensor = empty(full, own).fill_(1)
        law.put(grown, own, rows)
        return grown

    def _joined(self) -> tuple[int, ...]:
        shapes = [a.shape for a in self.args[:2] if isinstance(a, Tensor)]
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]

    def bytes(self) -> int:
        """Return the bytes in use while it draws, if it draws as many numbers as are requested."""
        size = 1
        for count in self.pattern.sizes:
            size *= count
        first = next((a for a in self.args if isinstance(a, Tensor)), None)
        dtype = self.kwargs.get("dtype") or (torch.float64 if first is None else first.dtype)
        item = int(dtype.itemsize)
        tensors = {"written": 1, "sized": 1, "normal": 3}.get(self.category, 2)
        operands = (
            sum(isinstance(a, Tensor) for a in self.args[1:]) if self.category == "written" else 0
        )
        masks = size if self.category == "dropout" else 0
        return size * item * (tensors + operands) + masks


def _aligned(own: Tensor, rows: RowRange) -> bool:
    """Return whether a tensor begins where a new one would, in the full batch too."""
    offset = int(own.storage_offset())
    each, rest = divmod(offset, rows.size)
    offsets = (offset, each * rows.of)
    return offset == 0 or (
        not rest and all(offset * own.element_size() % 16 == 0 for offset in offsets)
    )


def fault_of(name: str, law: Law, dims: int) -> str | None:
    """Return why a micro-batch cannot make a draw for the full batch; None where it can."""
    if law.dim is None:
        return None
    if name == "randperm" or (name == "multinomial" and law.dim == dims - 1):
        return "it chooses among the samples"
    if CATEGORY.get(f"aten::{name}") == "values":
        return "how much it draws for a sample depends on the values of others"
    return None


def _own(entries: Tensor) -> Tensor:
    """Return entries in memory of their own, so that the rest is free."""
    return entries.clone(memory_format=torch.contiguous_format)


# Refusals of draws that a micro-batch cannot make for the full batch, with a way out.

WAY_OUT = 'Use rng="micro_batch", or give micro_batch >= the batch size'


def state_now() -> Any:
    """Return a value that differs between states of torch's generators."""
    cpu = hash(torch.get_rng_state().numpy().tobytes())
    others = random_states()
    return (cpu, *(state.numpy().tobytes() for _, state in others)) if others else cpu


def unmoved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a kernel that may draw inside, and refuse it if it draws."""
    _refuse_stateful(func, args, kwargs)
    with torch._C.DisableTorchFunction():
        before = state_now()
        result = func(*args, **kwargs)
        moved = state_now() != before
    if moved:
        raise NotExactError(
            f"random draws must be intercepted to be made for the full batch, and {func} draws "
            "inside its kernel: use a function that calls a kernel of torch for the draw, without "
            f"out=, or torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for attention. {WAY_OUT}"
        )
    return result


def _refuse_stateful(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name not in STATEFUL:
        return
    arguments = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    if arguments.get(STATEFUL[schema.name]) and arguments.get("train"):
        raise NotExactError(
            f"random draws must come from torch's generators, and {schema.name} has its own for "
            f"the dropout between layers: put nn.Dropout between single layers. {WAY_OUT}"
        )


def refuse_generator(draw: Draw) -> None:
    """Refuse a draw from a generator that is not the global one."""
    if draw.generator:
        raise NotExactError(
            f"random draws must come from the global generators, and {draw.name} has one of its "
            "own (generator=), which every micro-batch would advance: leave generator= out. "
            f"{WAY_OUT}"
        )


def drawn_late(draw: Draw) -> NotExactError:
    """Return the error for a draw in backward that is none of forward."""
    return NotExactError(
        f"draws in backward must repeat those of forward, and {draw.name} draws anew (a hook on a "
        "gradient, or checkpoint with preserve_rng_state=False): every micro-batch would draw for "
        f"itself. {WAY_OUT}"
    )


def refuse_scripted(model: nn.Module) -> None:
    """Refuse a scripted part in training mode: its interpreter lets no mode intercept draws."""
    if any(isinstance(m, torch.jit.ScriptModule) and in_training(m) for m in model.modules()):
        raise NotExactError(
            "random draws must be intercepted to be made for the full batch, and a part of the "
            "model is a torch.jit.ScriptModule in training mode: use the module it was made of. "
            f"{WAY_OUT}"
        )


# Bytes of the draws of a forward, from which a plan forecasts full-batch draws.


class Weighing(DispatchMode):
    """Note the bytes that each draw takes while it is made.

    Attributes:
        bytes: of the draws, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one kernel."""
        kwargs, category = kwargs or {}, category_of(func)
        if category not in ("", "unknown"):
            self.bytes.append(Draw(func, args, kwargs, category).bytes())
        return func(*args, **kwargs)


def largest_draw(found: Sequence[Sequence[int]], counts: Sequence[int], size: int) -> int:
    """Return the bytes of the largest draw of `size` samples, from those at a few."""
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
