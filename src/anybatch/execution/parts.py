"""The forward of a micro-batch in parts that do not meet, so that one graph is there at a time.

A loss of all outputs has been computed when the second pass begins (`anybatch.execution.gather`),
so a backward needs only its own outputs. In a model of `Encoders`, the saved tensors of one are
freed before the next one runs; any other model is one part.

    at once:  image ─ text ─ backward of both      parts:  image ─ backward │ text ─ backward

Where forward moves no buffer, one encoder runs on all micro-batches before the next one does: in
laps, which is faster by the weights in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from anybatch.core.batch import MicroBatch, TensorBatch
from anybatch.execution.encoders import SCALE, Encoders
from anybatch.execution.step import Step

Lap = int | None
"""The part that is run on all micro-batches; None runs all parts on each of them."""


class Parts:
    """Parts of the forward of a micro-batch, in order; `len` is their number.

    Args:
        step: the step of the model.
        inputs: of any micro-batch, as `feed` gives them.
        lap: the part to run. Default None: all.
    """

    def __init__(self, step: Step, inputs: Any, lap: Lap = None) -> None:
        self._step, self._names, self._lap = step, _names(step, inputs), lap

    def __len__(self) -> int:
        return max(len(self._names), 1)

    def forward(self, micro: MicroBatch, at: int) -> Any:
        """Run part `at`, the parts before it having been run; return its outputs."""
        if not self._names:
            return self._step.forward(micro)
        name, all_parts = self._names[at], self._lap is None
        micro = MicroBatch({name: micro.inputs[name]}, None, micro.size, micro.begin)
        begins, ends = all_parts and at == 0, all_parts and at == len(self) - 1
        outputs = self._step.forward(micro, begins=begins, ends=ends)
        if at or self._lap:  # a scale comes with the first one
            outputs.pop(SCALE, None)
        return outputs

    def outputs(self, micro: MicroBatch, *, graph: bool) -> list[Any]:
        """Run all parts without graphs, except the last where `graph` is set."""
        found = []
        for at in range(len(self)):
            with torch.set_grad_enabled(graph and at + 1 == len(self)):
                self._step.forget_casts()
                found.append(self.forward(micro, at))
        return found


def joined(outputs: list[Any]) -> Any:
    """Return the model's outputs, joined from those of its parts or laps in order."""
    if len(outputs) == 1:
        return outputs[0]
    return {name: found for part in outputs for name, found in part.items()}


def laps(step: Step, *, all_parts: bool = False) -> list[Lap]:
    """Return the laps of a pass over the batch of a step.

    Args:
        step: the step.
        all_parts: all parts of a micro-batch are run before the next one. Default False.
    """
    batch = step.batch
    if all_parts or not isinstance(batch, TensorBatch) or step.offloader or not step.buffers.still:
        return [None]
    names = _names(step, batch.inputs)
    return [*range(len(names))] if len(names) > 1 else [None]


def feed(step: Step, lap: Lap) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a step on the device, with the inputs of a lap; targets once."""
    batch = step.batch
    if lap is None or not isinstance(batch, TensorBatch):
        return step.feed()
    name = _names(step, batch.inputs)[lap]
    targets = batch.targets if lap == 0 else None
    return step.feed(replace(batch, inputs={name: batch.inputs[name]}, targets=targets))


def _names(step: Step, inputs: Any) -> list[str]:
    """Return the names of the encoders that are run, in order; none where the model is one part.

    It is one part if a hook or a caller may need all outputs at once, or if full-batch draws are
    made in the order of its forward.
    """
    model = step.model
    if not isinstance(model, Encoders) or not isinstance(inputs, Mapping):
        return []
    hooks = model._forward_hooks or model._forward_pre_hooks or model._backward_hooks
    if step.draws is not None or hooks or type(model).forward is not Encoders.forward:
        return []
    return [name for name in model.encoders if name in inputs]
