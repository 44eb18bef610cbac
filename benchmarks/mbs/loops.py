"""The loops people write when a batch is too big, one function each.

Every loop has the signature `loop(problem, micro_batch) -> loss`: it adds to the gradients
of `problem.model` and returns the loss, detached. `naive`, `mbp`, `accelerate` and `fabric`
divide each micro-batch's loss by the number of micro-batches (MBS, Algorithm 1). `by_hand`
is the fastest loop we can write *that yields the gradient of the whole batch*; it is the
baseline of the speed table. Whatever a loop can set up once is set up once.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.mbs.problem import (
    Problem,
    call,
    loss_of,
    micro_batches,
    number_of,
)

Loop = Callable[[Problem, int], Tensor]


def undivided(problem: Problem, _micro_batch: int) -> Tensor:
    """The whole batch at once: the oracle."""
    loss = loss_of(problem, call(problem.model, problem.inputs), problem.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def naive(problem: Problem, micro_batch: int) -> Tensor:
    """Each micro-batch's loss divided by the number of micro-batches."""
    steps = number_of(problem, micro_batch)
    total = torch.zeros(())
    for inputs, targets in micro_batches(problem, micro_batch):
        loss = loss_of(problem, call(problem.model, inputs), targets) / steps
        loss.backward()  # type: ignore[no-untyped-call]
        total = total + loss.detach()
    return total


def by_hand(problem: Problem, micro_batch: int) -> Tensor:
    """The gradient of the whole batch: denominators first, or two passes."""
    return _counted(problem, micro_batch) if problem.terms else _two_passes(problem, micro_batch)


def _counted(problem: Problem, micro_batch: int) -> Tensor:
    counts = [term.count(problem.inputs, problem.targets) for term in problem.terms]
    total = torch.zeros(())
    for inputs, targets in micro_batches(problem, micro_batch):
        outputs = call(problem.model, inputs)
        parts = [
            term.total(outputs, inputs, targets) / count
            for term, count in zip(problem.terms, counts, strict=True)
        ]
        loss = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total = total + loss.detach()
    return total


def _two_passes(problem: Problem, micro_batch: int) -> Tensor:
    """Outputs first, then one loss on all, then each micro-batch's share of its gradient.

    The last micro-batch keeps its graph, so that it runs forward only once.
    """
    parts = [inputs for inputs, _ in micro_batches(problem, micro_batch)]
    with torch.no_grad():
        outputs = [_leaves(call(problem.model, inputs)) for inputs in parts[:-1]]
    last = call(problem.model, parts[-1])
    rows = [*outputs, [leaf.detach() for leaf in _leaves(last)]]
    joined = [torch.cat(column).requires_grad_() for column in zip(*rows, strict=True)]
    loss = loss_of(problem, _rebuild(last, iter(joined)), problem.targets)
    grads = torch.autograd.grad(loss, joined)
    shares = list(zip(*(torch.split(grad, micro_batch) for grad in grads), strict=True))
    torch.autograd.backward(_leaves(last), list(shares[-1]))
    for inputs, share in zip(parts[:-1], shares[:-1], strict=True):
        torch.autograd.backward(_leaves(call(problem.model, inputs)), list(share))
    return loss.detach()


def _leaves(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    return [leaf for value in values for leaf in _leaves(value)]


def _rebuild(like: Any, leaves: Any) -> Any:
    if isinstance(like, Tensor):
        return next(leaves)
    if isinstance(like, Mapping):
        return {key: _rebuild(value, leaves) for key, value in like.items()}
    return type(like)(_rebuild(value, leaves) for value in like)


def mbp(problem: Problem, micro_batch: int) -> Tensor:
    """mbp-pytorch, the MBS authors' package: its decorator on the loss function."""
    import mbp as package

    leaves = {f"x{i}": leaf for i, leaf in enumerate(_leaves(problem.inputs))}
    if problem.targets is not None:
        leaves |= {f"y{i}": leaf for i, leaf in enumerate(_leaves(problem.targets))}
    device = next(iter(leaves.values())).device

    @package.apply(list(leaves), ub_size=micro_batch, device=device)  # type: ignore[untyped-decorator]
    def step(**named: Tensor) -> Tensor:
        inputs = _rebuild(problem.inputs, (named[name] for name in leaves if name[0] == "x"))
        targets = (
            None
            if problem.targets is None
            else _rebuild(problem.targets, (named[name] for name in leaves if name[0] == "y"))
        )
        return loss_of(problem, call(problem.model, inputs), targets)

    if number_of(problem, micro_batch) > 1:
        return torch.as_tensor(step(**leaves)).detach()
    with warnings.catch_warnings():  # one micro-batch: it warns and leaves backward to us
        warnings.simplefilter("ignore")
        loss = torch.as_tensor(step(**leaves))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


@lru_cache(maxsize=1)
def _accelerator(device: str) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=device == "cpu")


def accelerate(problem: Problem, micro_batch: int) -> Tensor:
    """Hugging Face Accelerate: `accumulate`, and `backward` that divides by the steps."""
    accelerator = _accelerator(_device(problem.model))
    accelerator.gradient_accumulation_steps = number_of(problem, micro_batch)
    total = torch.zeros(())
    for inputs, targets in micro_batches(problem, micro_batch):
        with accelerator.accumulate(problem.model):
            loss = loss_of(problem, call(problem.model, inputs), targets)
            accelerator.backward(loss)
            total = total + loss.detach() / accelerator.gradient_accumulation_steps
    return total


@lru_cache(maxsize=4)
def _fabric(model: nn.Module) -> tuple[Any, Any]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=_device(model), devices=1)
    return fabric, fabric.setup(model)


def fabric(problem: Problem, micro_batch: int) -> Tensor:
    """Lightning Fabric: `no_backward_sync` on all micro-batches but the last."""
    runner, model = _fabric(problem.model)
    steps = number_of(problem, micro_batch)
    total = torch.zeros(())
    for index, (inputs, targets) in enumerate(micro_batches(problem, micro_batch)):
        with runner.no_backward_sync(model, enabled=index < steps - 1):
            loss = loss_of(problem, call(model, inputs), targets) / steps
            runner.backward(loss)
        total = total + loss.detach()
    return total


def _device(model: nn.Module) -> str:
    return next(model.parameters()).device.type


LOOPS: dict[str, Loop] = {
    loop.__name__: loop for loop in (undivided, naive, by_hand, mbp, accelerate, fabric)
}
PEERS = {"mbp": "mbp", "accelerate": "accelerate", "fabric": "lightning"}  # loop -> module
