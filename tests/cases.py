"""Steps as an engine describes them to its dry runs."""

from __future__ import annotations

from typing import Any

from torch import nn

from anybatch import Engine
from anybatch.execution.signature import Case, as_fakes
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
