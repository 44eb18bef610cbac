"""Retry inside a step that ran out of memory: smaller, and only of work to be repeated.

Finders of a batch size catch the error around a whole training and start that over; a loop that
catches it around one micro-batch has half a gradient in ``.grad``, moved buffers and RNG, and the
exception that it is handling still holds the memory. Here an attempt begins at a recorded state,
and the retry outside of the ``except`` block, after the frames of the failed one have been emptied.

    forward of mu_k failed            mu_k again in halves, the rest of the step in halves too
    backward, sums in an accumulator  the same: what grew of .grad is thrown away
    backward, sums in place           the step from its start, at half the size
    the observer failed               out: it has seen what it must not see twice

Source: MBS, section 3.2 (the micro-batch must fit); the ways back are ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from anybatch.core import tree
from anybatch.core.batch import MicroBatch
from anybatch.core.memory_errors import out_of_memory
from anybatch.distributed.coordinator import RanksAgainError
from anybatch.execution.step import Step


class StartOverError(Exception):
    """A micro-batch can be done smaller only if all of the step is; `Step.limit` says how small."""


def in_pieces(
    step: Step,
    micro: MicroBatch,
    work: Callable[[MicroBatch], None],
    sizes: Sequence[int] | None = None,
) -> None:
    """Do `work` on a micro-batch, and where memory runs out, on its parts.

    Args:
        step: its `limit` is the most samples of a part; it is halved at every failure.
        micro: a micro-batch as it was loaded.
        work: changes its counters only when it can no longer fail.
        sizes: rows of the parts to begin with; None (default) begins with all of it.

    Raises:
        Exception: `work` failed, and it is not for memory, or cannot be undone here, or a single
            sample was too much.
    """
    at_once = sizes is None or list(sizes) == [micro.size]
    todo = [micro] if at_once or sizes is None else [*cut(micro, sizes)][::-1]
    while todo:
        piece = todo.pop()
        if piece.size > step.limit:
            todo += [*_at_most(step.limit, piece)][::-1]
            continue
        moment = step.moment()
        failure = attempt(step, partial(work, piece))
        if failure is None:
            continue
        step.go_back(moment, failure)
        failure = None
        todo += [*_at_most(min(step.limit, _half(piece.size)), piece)][::-1]


def attempt(step: Step, work: Callable[[], None]) -> Exception | None:
    """Do `work`, and return the out-of-memory error that ended it; None if it is done."""
    outside = sys.exception()
    step.phase = "forward"
    try:
        with step.drawing():
            work()
    except Exception as error:
        if not out_of_memory(error, outside=outside):
            raise
        return error
    return None


def run_with_retries(step: Step, run: Callable[[], Tensor], prepare: Callable[[], None]) -> Tensor:
    """Run a step; while memory runs out, again from its start, at half the size.

    Args:
        step: the step; nothing of it has been run.
        run: all of it.
        prepare: puts everything back, for a run with `step.limit` samples in a micro-batch.

    Returns:
        The loss.

    Raises:
        Exception: a single sample was too much, or something else than memory failed; an
            out-of-memory error before it is its cause.
    """
    outside = sys.exception()
    ready: Callable[[], None] | None = None
    while True:
        try:
            if ready is not None:
                ready()
            return run()
        except RanksAgainError as again:
            ready = partial(_with_all, step, prepare, coupled=again.coupled)
            continue
        except StartOverError:
            failure = None
        except Exception as error:
            failure = _for_memory(step, error, outside)
        ready = partial(_again, step, prepare)
        if failure is not None:
            step.shrink(failure)


def _again(step: Step, prepare: Callable[[], None]) -> None:
    step.global_batch.again(coupled=False)
    prepare()


def _with_all(step: Step, prepare: Callable[[], None], *, coupled: bool) -> None:
    """Make ready for a run that all ranks begin again."""
    step.global_batch.anew()
    step.coupled = step.coupled or coupled
    prepare()


def _for_memory(step: Step, error: Exception, outside: BaseException | None) -> Exception:
    """Return an error that a smaller step may not meet; raise any other."""
    if not out_of_memory(error, outside=outside):
        if step.failure is not None and error.__cause__ is None:
            error.__cause__ = step.failure
        raise error
    if not step.can_shrink():
        raise error
    return error


def cut(micro: MicroBatch, sizes: Sequence[int]) -> Iterator[MicroBatch]:
    """Yield the next `sizes` rows of a micro-batch, as views."""
    start = 0
    for size in sizes:
        stop = start + size
        inputs = tree.rows(micro.inputs, start, stop, micro.size)
        targets = tree.rows(micro.targets, start, stop, micro.size)
        yield MicroBatch(inputs, targets, size, micro.begin + start)
        start = stop


def _at_most(limit: int, micro: MicroBatch) -> Iterator[MicroBatch]:
    full, rest = divmod(micro.size, limit)
    return cut(micro, [limit] * full + [rest] * (rest > 0))


def _half(size: int) -> int:
    return (size + 1) // 2
