"""Steps as an engine describes them to its dry runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from anybatch import Engine
from anybatch.execution.signature import Case, as_fakes
from anybatch.loss.traced_model import OfModel, TracedModel
from anybatch.memory.ledger import AffineTimeline
from anybatch.planner import rehearsal


def inputs_of(model: nn.Module, loss: Any, **options: Any) -> Any:
    """Return what an engine holds of its steps."""
    return Engine(model, loss, memory="1GiB", **options)._inputs


def case_of(
    model: nn.Module, loss: Any, x: Any, y: Any = None, *, fakes: bool = False, **options: Any
) -> Case:
    """Return the case of a step on these rows, or on fakes of them."""
    inputs = inputs_of(model, loss, **options)
    case: Case = inputs.case(inputs.batch(x, y), inputs.modules(), trains=True)
    return as_fakes(case) if fakes else case


def inspected(case: Case, rows: int = 4) -> Any:
    """Return what the first dry run of a case shows of its model."""
    return rehearsal.inspect_model(case, rows)[1]


def line_of(owners: tuple[str, ...], live: np.ndarray) -> AffineTimeline:
    """Return bytes by event and owner, which as many are added to with each sample."""
    return AffineTimeline(owners, tuple(map(str, range(len(live)))), live, live)


def own_loss(model: nn.Module) -> tuple[Any, Any]:
    """Return a model that computes its own loss and the loss, as a trainer gives both."""
    traced = TracedModel(model)
    return traced, OfModel(traced)
