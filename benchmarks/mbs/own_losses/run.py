"""Losses that people write themselves: one pass, beside the best loop by hand and two passes.

Each loss is written as one would for a batch that fits. By hand its terms are weighted for every
micro-batch, with the denominators counted before. Two passes are what the engine takes for a loss
whose samples meet: here one value of the targets is read in Python, which hides what the loss does
with the others. The three alternate in one process, from empty gradients; all three gradients are
compared with the undivided batch before they are timed.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from time import thread_time
from typing import Annotated

import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

from anybatch import Engine
from benchmarks.environment import environment
from benchmarks.mbs.loops import by_hand, undivided
from benchmarks.mbs.measure import gradients, worst
from benchmarks.mbs.models import TransformerLM, UNet
from benchmarks.mbs.problem import Problem, term
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED = 0
BOUND = 1e-4
"""The most that a gradient in float32 may differ from that of the undivided batch, relatively."""

IGNORED = 0.2


def _focal(logits: Tensor, masks: Tensor) -> Tensor:
    each = functional.binary_cross_entropy_with_logits(logits, masks, reduction="none")
    return (1 - torch.exp(-each)) ** 2 * each


def _dice(logits: Tensor, masks: Tensor) -> Tensor:
    share, masks = logits.sigmoid().flatten(1), masks.flatten(1)
    return 1 - (2 * (share * masks).sum(1) + 1) / (share.sum(1) + masks.sum(1) + 1)


def segmentation() -> Problem:
    """A U-Net with a focal loss and the Dice of each image."""

    def loss(logits: Tensor, masks: Tensor) -> Tensor:
        return _focal(logits, masks).mean() + _dice(logits, masks).mean()

    terms = (
        term(lambda o, t: _focal(o, t).sum(), Tensor.numel),
        term(lambda o, t: _dice(o, t).sum()),
    )
    inputs, masks = torch.randn(22, 3, 96, 96), (torch.rand(22, 1, 96, 96) > 0.7).float()
    return Problem(UNet(), loss, None, inputs, masks, 22, terms)


def _tokens(logits: Tensor, targets: Tensor) -> Tensor:
    each = functional.cross_entropy(logits.transpose(1, 2), targets.clamp(min=0), reduction="none")
    return each * (targets >= 0)


def language() -> Problem:
    """A language model with a mask, and a penalty of large logits (z-loss)."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        nll = _tokens(logits, targets).sum() / (targets >= 0).sum()
        return nll + 1e-4 * logits.logsumexp(-1).square().mean()

    terms = (
        term(lambda o, t: _tokens(o, t).sum(), lambda t: (t >= 0).sum()),
        term(lambda o, _: 1e-4 * o.logsumexp(-1).square().sum(), Tensor.numel),
    )
    tokens = torch.randint(256, (60, 65))
    targets = tokens[:, 1:].masked_fill(torch.rand(60, 64) < IGNORED, -1)
    return Problem(TransformerLM(), loss, None, tokens[:, :-1], targets, 60, terms)


class Autoencoder(nn.Module):
    """A variational autoencoder of 28x28 images, without its noise."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 128))
        self.decoder = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 784))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[n, 784] -> reconstructions, means and logarithms of variances."""
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean), mean, log_variance


def autoencoder() -> Problem:
    """A variational autoencoder with its divergence; the loss takes three outputs."""

    def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
        return -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)

    def loss(made: Tensor, mean: Tensor, log_variance: Tensor, x: Tensor) -> Tensor:
        return functional.mse_loss(made, x) + divergence(mean, log_variance).mean()

    terms = (
        term(lambda o, t: functional.mse_loss(o[0], t, reduction="sum"), Tensor.numel),
        term(lambda o, _: divergence(o[1], o[2]).sum()),
    )
    x = torch.rand(512, 784)
    return Problem(Autoencoder(), loss, None, x, x, 512, terms)


def policy() -> Problem:
    """A small policy with the clipped objective of PPO."""

    def objective(scores: Tensor, past: Tensor) -> Tensor:
        action, before, gain = past[:, :1].long(), past[:, 1:2], past[:, 2:]
        ratio = torch.exp(scores.log_softmax(1).gather(1, action) - before)
        return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)

    def loss(scores: Tensor, past: Tensor) -> Tensor:
        return objective(scores, past).mean()

    past = torch.cat(
        [torch.randint(6, (2048, 1)).float(), -torch.rand(2048, 1) - 1, torch.randn(2048, 1)], 1
    )
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
    terms = (term(lambda o, t: objective(o, t).sum()),)
    model.append(nn.Linear(256, 6))
    return Problem(model, loss, None, torch.randn(2048, 64), past, 2048, terms)


STEPS: dict[str, tuple[Callable[[], Problem], int]] = {  # name -> problem, micro-batch
    "U-Net, focal loss and Dice of each image": (segmentation, 8),
    "language model, masked, with z-loss": (language, 16),
    "variational autoencoder": (autoencoder, 128),
    "policy, clipped": (policy, 512),
}


def hidden(problem: Problem) -> Callable[..., Tensor]:
    """Return the loss after a value of the targets was read: it counts as one of all samples."""
    loss = problem.loss_fn
    assert loss is not None

    def reading(outputs: object, targets: Tensor) -> Tensor:
        assert targets.flatten()[0].isfinite()
        items = outputs if isinstance(outputs, tuple) else (outputs,)
        return loss(*items, targets)

    return reading


def loops_of(problem: Problem, micro_batch: int) -> dict[str, Callable[[], Tensor]]:
    """Return the loops by name; the engines are made once."""
    one = Engine(problem.model, problem.loss_fn, micro_batch=micro_batch)
    two = Engine(problem.model, hidden(problem), micro_batch=micro_batch)
    loops: dict[str, Callable[[], Tensor]] = {
        "by_hand": lambda: by_hand(problem, micro_batch),
        "one_pass": lambda: one.backward(problem.inputs, problem.targets),
        "two_passes": lambda: two.backward(problem.inputs, problem.targets),
    }
    full = full_batch(problem)
    want = gradients(full, problem, micro_batch)
    for name, loop in loops.items():
        error = worst(gradients(lambda *_, run=loop: run(), problem, micro_batch), want)
        if not error <= BOUND:
            raise SystemExit(f"{name} differs from the undivided batch by {error:.1e}")
    for name, engine in (("streaming", one), ("two-pass", two)):
        assert engine.plan is not None
        if engine.plan.mechanism != name:
            raise SystemExit(f"{engine.plan.mechanism} instead of {name}")
    return loops


def full_batch(problem: Problem) -> Callable[[Problem, int], Tensor]:
    """Return the undivided step; a loss of several outputs gets them one by one."""
    plain = Problem(
        problem.model, hidden(problem), None, problem.inputs, problem.targets, problem.batch
    )
    return lambda _problem, size: undivided(plain, size)


def timed(problem: Problem, micro_batch: int, count: int) -> dict[str, object]:
    """Return median milliseconds of each loop, and medians of ratios to the loop by hand."""
    loops = loops_of(problem, micro_batch)
    found: dict[str, list[float]] = {name: [] for name in loops}
    for index in range(count + 3):
        for name in sorted(loops, reverse=bool(index % 2)):
            problem.model.zero_grad(set_to_none=True)
            start = thread_time()
            loops[name]()
            if index >= 3:
                found[name].append(thread_time() - start)
    ratios = {
        name: statistics.median(a / b for a, b in zip(times, found["by_hand"], strict=True))
        for name, times in found.items()
    }
    return {
        "micro_batches": -(-problem.batch // micro_batch),
        "ms": {n: round(1000 * statistics.median(times), 3) for n, times in found.items()},
        "of_by_hand": {name: round(ratio, 4) for name, ratio in ratios.items()},
    }


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    count: Annotated[int, typer.Option("--runs", help="steps of each loop")] = 40,
) -> None:
    """Time the steps of losses that people write, and write results.json."""
    torch.set_num_threads(1)
    count = 2 if quick else count
    steps = {}
    for name, (make, micro_batch) in track(STEPS.items(), "losses", len(STEPS), console=console):
        torch.manual_seed(SEED)
        steps[name] = timed(make(), micro_batch, count)
    write(
        out / "results.json",
        {"seed": SEED, "runs": count, "steps": steps, "environment": environment()},
    )


if __name__ == "__main__":
    typer.run(main)
