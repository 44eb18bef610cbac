"""One rank of three trainings that take turns: local, global and adaptive BatchNorm.

Two trainings that run one after the other meet another machine each: what else runs there changes.
So every epoch is trained by all three before the next begins, in an order that turns, and the
seconds of an epoch are compared within that round.

    epoch 1:  local  global  adaptive      the same mini-batches, drawn before the clock starts
    epoch 2:  global  adaptive  local
    epoch 3:  adaptive  local  global

Each is an engine of its own, on a model of its own with the weights of the seed. Between epochs,
when no clock runs, rank 0 looks at the validation images with its own buffers, and all ranks hear
of the loss: the adaptive policy must see the same value everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Adaptive, Engine, Plateau
from benchmarks.agbn.images import Images, mini_batches
from benchmarks.agbn.training import AT, Count, Outcome, Recipe, evaluate, initial

ARMS = ("local", "global", "adaptive")
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Steady(Recipe):
    """The recipe with a learning rate that stays where it has risen to.

    Adaptive BatchNorm waits for convergence, and with a rate that falls to zero at the end of a
    short training the loss falls until then. The published recipe is as steady, up to its plateau.
    """

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0 over the whole training."""
        return self.lr * self.batch / AT * min(1.0, (step + 1) / (self.rise * self.steps))


@dataclass(frozen=True)
class Job:
    """Three trainings of one seed over so many ranks; `patience` is the adaptive criterion's."""

    ranks: int
    seed: int
    patience: int
    recipe: Steady


@dataclass(frozen=True)
class Data:
    """What is trained on, what the adaptive policy looks at, and what accuracy is told of."""

    train: Images
    validation: Images
    test: Images


class Arm:
    """One of the three trainings, on this rank."""

    def __init__(self, name: str, job: Job) -> None:
        self.recipe, self.model, self.policy = job.recipe, initial(job.seed), None
        self.found: Outcome = {
            name: [] for name in ("seconds", "train_loss", "train_accuracy", "validation_loss")
        } | {"batchnorm": []}
        batchnorm: Any = {"local": "local", "global": "exact"}.get(name)
        if batchnorm is None:
            # No value of the metric may come of steps: validation alone decides.
            batchnorm = self.policy = Adaptive(
                criterion=Plateau(patience=job.patience), every=job.recipe.steps + 1
            )
        self.engine = Engine(
            self.model, F.cross_entropy, micro_batch=job.recipe.batch, batchnorm=batchnorm
        )
        self.optimizer = job.recipe.optimizer(self.model)
        self.steps = 0

    def epoch(self, batches: Batches) -> None:
        """Train this rank's rows of every mini-batch; note the seconds of the slowest rank."""
        count, losses = Count(), list[float]()
        dist.barrier()
        begin = perf_counter()
        for inputs, targets in batches:
            self.optimizer.param_groups[0]["lr"] = self.recipe.rate(self.steps)
            self.optimizer.zero_grad()
            losses.append(float(self.engine.backward(inputs, targets, observe=count)))
            self.optimizer.step()
            self.steps += 1
        seconds = torch.tensor([perf_counter() - begin])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        counts = torch.tensor([count.right, count.total])
        dist.all_reduce(counts)
        last = self.engine.last
        assert last is not None
        self._note(seconds=float(seconds), batchnorm=last.batchnorm)
        self._note(
            train_loss=sum(losses) / len(losses), train_accuracy=float(counts[0] / counts[1])
        )

    def validate(self, images: Images) -> None:
        """Let rank 0 compute the validation loss, and pass it to the policy, if there is one."""
        loss = torch.zeros(1)
        if dist.get_rank() == 0:
            loss[0] = evaluate(self.model, images)[0]
        dist.broadcast(loss, 0)
        self._note(validation_loss=float(loss))
        if self.policy is not None:
            self.policy.measured(float(loss))

    def _note(self, **figures: Any) -> None:
        for name, figure in figures.items():
            self.found[name].append(figure)


def train(rank: int, job: Job, meet: str, data: Data) -> dict[str, Outcome]:
    """Train all three in turns; return what each has come to."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=job.ranks)
    arms = {name: Arm(name, job) for name in ARMS}
    for epoch in range(job.recipe.epochs):
        drawn = mini_batches(data.train, job.recipe.batch, job.seed, epoch)
        batches = [(x[rank :: job.ranks].contiguous(), y[rank :: job.ranks]) for x, y in drawn]
        first = epoch % len(ARMS)
        for name in (*ARMS[first:], *ARMS[:first]):
            arms[name].epoch(batches)
        for arm in arms.values():
            arm.validate(data.validation)
    for arm in arms.values():
        arm.found["test_accuracy"] = _accuracy(arm.model, data.test)
    dist.barrier()
    dist.destroy_process_group()
    return {name: arm.found for name, arm in arms.items()}


def _accuracy(model: nn.Module, images: Images) -> float:
    return evaluate(model, images)[1] if dist.get_rank() == 0 else 0.0
