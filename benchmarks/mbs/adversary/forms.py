"""The register of couplings: each is a body for a place in a model or in a loss.

A body takes its place (a module with the layers and the state that it needs) and rows ``[n, d]``,
and returns rows of that shape. Where ``place.honest`` is set it is the honest twin: the same form,
over features instead of over samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Body = Callable[["Place", Tensor], Any]


@dataclass(frozen=True)
class Form:
    """One coupling.

    Attributes:
        group: such as "statistics"; a row of the table.
        body: (place, rows) -> rows.
        prepare: adds layers and state to a place of a width.
        draws: random numbers of which the undivided batch's are wanted: ``rng="batch"``.
        rough: a result that jumps (an order, an index): not in bfloat16, where rounding decides.
        in_loss: the place is in the loss.
        twin: there is an honest twin.
    """

    group: str
    body: Body
    prepare: Callable[["Place", int], None] | None = None
    draws: bool = False
    rough: bool = False
    in_loss: bool = False
    twin: bool = True


FORMS: dict[str, Form] = {}
GLOBAL: list[Tensor] = []
"""What a module keeps outside of every model; cleared before each run."""


def form(group: str, **options: Any) -> Callable[[Body], Body]:
    """Register the function below under its name."""

    def register(body: Body) -> Body:
        name = body.__name__.strip("_")
        assert name not in FORMS, name
        FORMS[name] = Form(group, body, **options)
        return body

    return register


class Place(nn.Module):
    """Where samples couple, or where its honest twin stands.

    Attributes:
        honest: the twin.
        dim: the dimension that a statistic is over: samples, or features.
        phase: the number of the step, from 0; the training loop sets it.
        link: the model's place, for a place in the loss; in a list so that it is no submodule.
    """

    weight: Any
    kernel: Any
    one: Any
    two: Any
    gate: Any
    expert: Any
    rnn: Any
    cell: Any
    heads: Any
    layer: Any
    inner: Any
    table: Any
    centre: Any
    rows: Any
    at: Any

    def __init__(self, name: str, width: int, *, honest: bool) -> None:
        super().__init__()
        self.form, self.honest, self.dim = name, honest, 1 if honest else 0
        self.phase = 0
        self.link: list[Place] = []
        self.cache: Any = None
        prepare = FORMS[name].prepare
        if prepare is not None:
            prepare(self, width)

    def forward(self, rows: Tensor) -> Any:
        """[n, d] -> [n, d]."""
        return FORMS[self.form].body(self, rows)


def weights(*shape: int) -> nn.Parameter:
    """A parameter of a seeded model."""
    return nn.Parameter(torch.rand(*shape) - 0.5)


def drawn(rows: Tensor) -> Tensor:
    """Standard normal numbers of the shape of rows, the same in every dtype."""
    return torch.randn(rows.shape, dtype=torch.float64, device=rows.device).to(rows.dtype)
