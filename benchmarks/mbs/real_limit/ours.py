"""The same step with anybatch, which is told the budget and nothing else."""

from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch import Engine
from benchmarks.mbs.real_limit.training import Step


def make(model: nn.Module, loss_fn: nn.Module, optimizer: Optimizer, budget: int | None) -> Step:
    """The engine as the README shows it."""
    engine = Engine(model, loss_fn, optimizer=optimizer, memory=budget)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        return engine.backward(inputs, targets)

    return step
