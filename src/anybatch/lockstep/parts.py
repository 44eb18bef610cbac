"""Errors of torch on batch normalisation of a part of a batch, in words that name the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from anybatch.errors import NotExactError
from anybatch.execution.proof.verdict import other_rows
from anybatch.lockstep.late import SINGLE

TWICE = "marked with @once_differentiable"


@contextmanager
def values_of_a_part() -> Iterator[None]:
    """Translate torch's error for one value a channel, where the full batch has several samples.

    Raises:
        NotExactError: batch normalisation was given so few of them, or was differentiated twice.
    """
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(SINGLE):
            raise
        why = "it has one value a channel"
        raise NotExactError(other_rows("a call in forward", why)) from error
    except RuntimeError as error:
        if TWICE not in str(error):
            raise
        raise NotExactError(
            "BatchNorm must be differentiated once where micro-batches wait for each other, and "
            "this step differentiates it twice (a gradient penalty, torch.autograd.grad with "
            "create_graph=True). Call eval() on it or give micro_batch >= the batch size"
        ) from error
