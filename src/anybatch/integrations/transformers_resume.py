"""Plans of a run in its checkpoint, so that a resumed run splits each batch as before.

The first steps of a run find the fastest size by a clock, and batches with longer samples are
planned only from shapes, from earlier forecasts. So a checkpoint stores the first plan with the
fastest size so far, and the shapes of the batches at which a plan was made, in order. A resumed run
plans them again, on rows of zeros, before its first step, with that size. Then it splits every
batch like an unbroken run; one resumed from within the first ten steps searches no further.

    planned:  8 x 11, searched ── 8 x 14 ── 8 x 16     checkpoint    resumed: again, again, again
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybatch.core.plan import Plan
from anybatch.engine.engine import Engine

NAME = "anybatch_plan.json"
Shape = tuple[list[int], str]
Shapes = tuple[dict[str, Shape], Shape | None]
"""Shape and dtype of a model's keyword arguments, and of separate labels, if any."""


class History:
    """The plans of a run.

    Attributes:
        plan: the first one; None before it.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self._planned: list[Shapes] = []
        self._again: list[Shapes] = []

    def note(self, engine: Engine, inputs: Mapping[str, Any], labels: Any) -> None:
        """Take in a step in which something was planned; rows of anything but tensors are left."""
        self.plan = self.plan or engine.plan
        if all(isinstance(value, Tensor) for value in inputs.values()):
            shapes = {name: _shape(value) for name, value in inputs.items()}
            self._planned.append((shapes, _shape(labels) if isinstance(labels, Tensor) else None))

    def options(self) -> dict[str, Any]:
        """Return options for an engine that continues as before: a budget, a size or a plan."""
        plan = self.plan
        if plan is None:
            return {}
        if plan.memory is None:
            return {"micro_batch": plan.micro_batch}
        return {"memory": plan.memory.budget} if self._again else {"plan": plan}

    def replay(self, engine: Engine) -> None:
        """Plan again the batches that were planned before the checkpoint."""
        again, self._again = self._again, []
        for place, (inputs, labels) in enumerate(again):
            rows = {name: _zeros(shape) for name, shape in inputs.items()}
            targets = None if labels is None else _zeros(labels)
            if place == 0 and self.plan is not None:
                engine._recall(self.plan.micro_batch, rows, targets)
            else:
                engine.foresee(rows, targets, timed=False)

    def save(self, folder: str, engine: Engine | None) -> None:
        """Write it to a checkpoint's folder, with the fastest way that an engine has found."""
        plan = self.plan
        if plan is not None and engine is not None and engine.plan is not None:
            fastest = replace(plan, micro_batch=engine._fastest or plan.micro_batch)
            plan = engine.plan if engine.plan.offload is not None else fastest
        if plan is not None:
            found = {"plan": json.loads(plan.to_json()), "planned": self._planned}
            Path(folder, NAME).write_text(json.dumps(found, indent=1))

    def load(self, folder: str) -> None:
        """Read it from there, if it is there."""
        path = Path(folder, NAME)
        if path.exists():
            found = json.loads(path.read_text())
            self.plan = Plan.from_json(json.dumps(found["plan"]))
            self._planned = found["planned"]
            simple = self.plan.memory is not None and self.plan.offload is None
            self._again = list(self._planned) if simple else []


def _shape(tensor: Tensor) -> Shape:
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _zeros(shape: Shape) -> Tensor:
    return torch.zeros(shape[0], dtype=getattr(torch, shape[1]))
