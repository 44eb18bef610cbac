"""Errors of a micro-batch of one sample: ``squeeze()`` takes out its dimension of samples, too."""

from __future__ import annotations

from typing import Any

from anybatch.core import pytree
from anybatch.core.barrier import looks_here
from anybatch.core.batch import MicroBatch
from anybatch.core.oom import out_of_memory
from anybatch.distributed.local_batch import Layout
from anybatch.errors import AnybatchError, BatchError, NotExactError
from anybatch.memory.fakes import is_fake

OF_NORMS = "more than 1 value per channel"
"""In torch's error where a batch normalisation has one value."""

SINGLE_SAMPLE = "a micro-batch of one sample"
SQUEEZE = (
    "write squeeze(-1) for [n, 1], flatten(1) for [n, C, 1, 1], squeeze(0) for a state [1, n, C]"
)


def refuse_single_sample(error: Exception, micro: MicroBatch, size: int) -> None:
    """Say in one sentence that a forward fails where a micro-batch, of `size`, holds one sample."""
    own = isinstance(error, AnybatchError) or looks_here() or out_of_memory(error)
    own |= OF_NORMS in str(error)
    if own or micro.size > 1 or size < 2 or any(map(is_fake, pytree.flat(micro.inputs))):
        return
    raise NotExactError(
        f"{SINGLE_SAMPLE} must be computed like those of several, and forward "
        f"fails on it ({type(error).__name__}: {str(error)[:120]}). Where squeeze() has taken "
        f"out the dimension of samples, {SQUEEZE}; else give a micro_batch without a last one "
        "of one sample, or one >= the batch size"
    ) from error


def check_single(outputs: Any, layout: Layout) -> None:
    """Refuse outputs of one sample that have lost the dimension of samples."""
    found = list(pytree.tensors(outputs, "outputs"))
    for (path, one), axis in zip(found, layout, strict=False):
        lost = axis is not None and (one.dim() <= axis or one.shape[axis] != 1)
        if lost and len(found) == len(layout):
            raise BatchError(
                f"an output must hold each sample once along dimension {axis}, and {path} of one "
                f"sample has shape {tuple(one.shape)}: squeeze() takes out every dimension of size "
                f"1, that of the samples, too. Name the dimension: {SQUEEZE}"
            )
