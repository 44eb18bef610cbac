"""How a micro-batch is found today, one function each: `find(problem, budget) -> Found`.

Every finder meets the same limit, the meter's, and its attempts run the same loop by hand, so
only the search differs. `largest_that_fits` bisects on the measured peak. `accelerate_decorator`
is Accelerate's own, at its own step of 0.9. `halving` is what Composer's automatic
micro-batching does. The two of Lightning are its Tuner (`lightning_finder.py`). None of them
times anything: they look for the most that fits.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from benchmarks.mbs.choice.meter import Meter, out_of_memory
from benchmarks.mbs.loops import by_hand
from benchmarks.mbs.problem import Problem, rows

Try = tuple[int, float, str]  # micro-batch, seconds, how it went: fits, out of memory, ...


@dataclass(frozen=True)
class Found:
    """A micro-batch, None where the search ended without one, and all that was tried for it."""

    size: int | None
    tried: list[Try] = field(default_factory=list)
    note: str = ""


Finder = Callable[[Problem, int], Found]


@dataclass
class Attempts:
    """Runs a problem at sizes under a budget and writes down how each of them went."""

    problem: Problem
    budget: int
    tried: list[Try] = field(default_factory=list)

    def step(self, size: int) -> None:
        """One step of the whole batch.

        Raises:
            RuntimeError: more bytes were live than the budget, as a full machine says it.
        """
        self._run(self.problem, size)

    def first(self, micro_batches: int, size: int) -> None:
        """The first micro-batches of the step; after two of them, no later one holds more.

        One would not do: the second finds the gradients of the first beside its own tensors.

        Raises:
            RuntimeError: more bytes were live than the budget, as a full machine says it.
        """
        count = min(micro_batches * size, self.problem.batch)
        part = slice(count)
        self._run(
            dataclasses.replace(
                self.problem,
                inputs=rows(self.problem.inputs, part),
                targets=rows(self.problem.targets, part),
                batch=count,
            ),
            size,
        )

    def _run(self, problem: Problem, size: int) -> None:
        problem.model.zero_grad(set_to_none=True)
        start, outcome = perf_counter(), "failed"
        try:
            with Meter(problem, self.budget):
                by_hand(problem, size)
            outcome = "fits"
        except RuntimeError as error:
            outcome = "out of memory" if out_of_memory(error) else outcome
            raise
        finally:
            self.tried.append((size, perf_counter() - start, outcome))

    def fits(self, size: int) -> bool:
        """Whether the step at a size stays within the budget."""
        return self._without_error(2, size)

    def first_fits(self, size: int) -> bool:
        """Whether the first micro-batch alone does, noted as `first fits`."""
        if not self._without_error(1, size):
            return False
        self.tried[-1] = (*self.tried[-1][:2], "first fits")
        return True

    def _without_error(self, micro_batches: int, size: int) -> bool:
        try:
            self.first(micro_batches, size)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            return False
        return True

    def found(self, size: int | None, note: str = "") -> Found:
        """The result of the search, with empty gradients behind it."""
        self.problem.model.zero_grad(set_to_none=True)
        return Found(size, list(self.tried), note)


def _most(fits: Callable[[int], bool], high: int) -> int:
    """The largest size up to `high` that fits, by bisection; 0 if none does."""
    if high and fits(high):
        return high
    low = 0  # fits; `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_that_fits(problem: Problem, budget: int) -> Found:
    """The largest micro-batch whose peak is within the budget, by bisection.

    A micro-batch holds more bytes the larger it is, yet a step does not: just above half of the
    batch the second micro-batch, which has gradients beside it, is the smaller one. So the first
    micro-batch is searched alone, then, if its step does not fit, the steps of equal ones.
    """
    attempts = Attempts(problem, budget)
    size = _most(attempts.first_fits, problem.batch)
    if size and not attempts.fits(size):
        size = _most(attempts.fits, min(size, problem.batch // 2))
    return attempts.found(size or None, "" if size else "not even one sample fits")


def accelerate_decorator(problem: Problem, budget: int) -> Found:
    """Hugging Face Accelerate's `find_executable_batch_size` around the step, from the batch."""
    from accelerate.utils import find_executable_batch_size

    attempts = Attempts(problem, budget)

    @find_executable_batch_size(starting_batch_size=problem.batch)  # type: ignore[untyped-decorator]
    def step(batch_size: int) -> int:
        attempts.step(batch_size)
        return batch_size

    try:
        return attempts.found(step())
    except RuntimeError as error:
        if not str(error).startswith("No executable batch size found"):
            raise
        return attempts.found(None, str(error))


def halving(problem: Problem, budget: int) -> Found:
    """From the whole batch, half of it after every out-of-memory, as Composer's `auto` does."""
    attempts, size = Attempts(problem, budget), problem.batch
    while True:
        try:
            attempts.step(size)
            return attempts.found(size)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
        if size == 1:
            return attempts.found(None, "a micro-batch of 1 is out of memory")
        size //= 2
