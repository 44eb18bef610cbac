"""One training problem, as a person has it: a model, a loss and a batch.

Every loop and every case speaks of the same `Problem`. Next to what the person wrote
(`loss_fn`) it holds what a careful person would work out on paper: the loss as a sum of
numerator / denominator `terms` that a loop by hand may use. Nothing here knows anybatch,
so that the baselines stay independent of the engine they judge.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

LossFn = Callable[..., Tensor]


@dataclass(frozen=True)
class Term:
    """One numerator and its denominator; the loss is the sum of the terms' ratios.

    `total(outputs, inputs, targets)` is a sum over samples, `count(inputs, targets)` its
    denominator: both add up over micro-batches.
    """

    total: Callable[[Any, Any, Any], Tensor]
    count: Callable[[Any, Any], Tensor | float]


@dataclass(frozen=True, eq=False)
class Problem:
    """A model, its loss as people write it, and a batch of `batch` samples.

    `loss_fn` is None where the model returns its own loss. `declared` makes the
    anybatch.Loss that the engine needs, None where it needs none. `terms` is empty where
    samples meet in the loss, and the loop by hand must take two passes.
    """

    model: nn.Module
    loss_fn: LossFn | None
    declared: Callable[[], Any] | None
    inputs: Any
    targets: Any
    batch: int
    terms: tuple[Term, ...] = ()


def term(total: Callable[[Any, Any], Tensor], count: Callable[[Any], Tensor | float] = len) -> Term:
    """A term that does not look at the inputs; its count defaults to the samples."""
    return Term(lambda outputs, _, targets: total(outputs, targets), lambda _, t: count(t))


def call(model: nn.Module, inputs: Any) -> Any:
    """A tensor is one argument, a tuple or list positional ones, a mapping named ones."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs)


def loss_of(problem: Problem, outputs: Any, targets: Any) -> Tensor:
    """The loss that the person wrote, or the one that the model returned."""
    if problem.loss_fn is not None:
        outputs_only = problem.targets is None  # a loss on the outputs only
        return problem.loss_fn(outputs) if outputs_only else problem.loss_fn(outputs, targets)
    if isinstance(outputs, Tensor):
        return outputs
    loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss
    assert isinstance(loss, Tensor)
    return loss


def rows(tree: Any, index: slice | Tensor) -> Any:
    """The samples `index` of every tensor of a tree; everything else as it is."""
    if isinstance(tree, Tensor):
        return tree[index]
    if isinstance(tree, Mapping):
        return {key: rows(value, index) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(rows(value, index) for value in tree)
    return tree


def micro_batches(problem: Problem, micro_batch: int) -> Iterator[tuple[Any, Any]]:
    """The inputs and targets of each micro-batch, the last one as small as it is."""
    for start in range(0, problem.batch, micro_batch):
        part = slice(start, start + micro_batch)
        yield rows(problem.inputs, part), rows(problem.targets, part)


def number_of(problem: Problem, micro_batch: int) -> int:
    """How many micro-batches there are: the paper's N_S."""
    return -(-problem.batch // micro_batch)
