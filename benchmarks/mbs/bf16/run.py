"""2048 micro-batches of a bfloat16 model: the accuracy of the gradient.

A bfloat16 sum of 2048 parts stops growing long before it is complete, because it keeps 8 bits. The
reference is the gradient in float64 of the same bfloat16-valued weights and inputs. `naive` lets
autograd accumulate into bfloat16 gradients. The engine delivers in the dtype of `.grad`: bfloat16
by default, rounded once, or float32 where `grad_dtype` is set. Each variant has AdamW steps of its
own; with float32 gradients they run on float32 copies of the weights, because AdamW refuses a
float32 gradient on a bfloat16 parameter. The labels are a teacher's and the inputs share a mean, so
that gradients add up as in real training.

A micro-batch's own gradient is rounded too, and no way of adding undoes that. Two losses show how
much that is: one in bfloat16, and one on `outputs.float()`, as in language models.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.environment import environment
from benchmarks.mbs.loops import Loop, naive, undivided
from benchmarks.mbs.measure import gradients, relative, worst
from benchmarks.mbs.models import MLP
from benchmarks.mbs.ours import anybatch
from benchmarks.mbs.problem import LossFn, Problem
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED, STEPS, RATE = 0, 3, 1e-3
MICRO_BATCH, MICRO_BATCHES = 5, 2048
BATCH = MICRO_BATCH * MICRO_BATCHES - 2  # a ragged tail; no denominator is a power of two
FEATURES, CLASSES = 24, 6


def upcast(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in float32 of half-precision outputs; a float64 oracle stays in float64."""
    half = outputs.dtype == torch.bfloat16
    return functional.cross_entropy(outputs.float() if half else outputs, labels)


LOSSES: dict[str, LossFn] = {"bfloat16": functional.cross_entropy, "float32": upcast}


def problem_of(batch: int, loss_fn: LossFn) -> Problem:
    """A bfloat16 classifier and labels from a fixed linear teacher."""
    torch.manual_seed(SEED)
    model = MLP(FEATURES, 48, CLASSES).bfloat16()
    inputs = (torch.randn(batch, FEATURES) + 0.5).bfloat16()
    labels = (inputs.float() @ torch.randn(FEATURES, CLASSES)).argmax(1)
    return Problem(model, loss_fn, None, inputs, labels, batch)


def truth(problem: Problem) -> Problem:
    """The same weights and inputs, widened to float64."""
    model = copy.deepcopy(problem.model)
    for parameter in model.parameters():
        parameter.grad = None
        parameter.grad_dtype = None
    loss, inputs = problem.loss_fn, problem.inputs.double()
    return Problem(model.double(), loss, None, inputs, problem.targets, problem.batch)


def deliver_float32(model: nn.Module) -> None:
    """Ask for float32 gradients of bfloat16 parameters, as a person does."""
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32


def keep(model: nn.Module) -> None:
    """Gradients in the dtype of the parameters, torch's default."""


def stepper(model: nn.Module) -> Callable[[], None]:
    """AdamW on the parameters, or on float32 copies where gradients are float32."""
    parameters = list(model.parameters())
    wide = parameters[0].grad_dtype == torch.float32
    owned = [p.detach().float() if wide else p for p in parameters]
    optimizer = torch.optim.AdamW(owned, lr=RATE)

    def step() -> None:
        if wide:
            for master, parameter in zip(owned, parameters, strict=True):
                master.grad = parameter.grad
        optimizer.step()
        if wide:
            with torch.no_grad():
                for master, parameter in zip(owned, parameters, strict=True):
                    parameter.copy_(master)

    return step


def variant(
    loop: Loop, prepare: Callable[[nn.Module], None], loss_fn: LossFn, batch: int, steps: int
) -> dict[str, Any]:
    """The errors before each AdamW step, and the dtype in which gradients came."""
    problem = problem_of(batch, loss_fn)
    prepare(problem.model)
    step = stepper(problem.model)
    found: dict[str, Any] = {"relative": [], "law1": []}
    for _ in range(steps):
        got = gradients(loop, problem, MICRO_BATCH)
        want = gradients(undivided, truth(problem), batch)
        found["relative"].append(relative(got[0], want[0]))
        found["law1"].append(worst((got[0], {}), (want[0], {})))
        found["dtype"] = str(next(iter(got[0].values())).dtype).removeprefix("torch.")
        before = [parameter.detach().clone() for parameter in problem.model.parameters()]
        step()
        found["moved"] = any(_differ(before, problem.model))
    return found


def _differ(before: list[Tensor], model: nn.Module) -> list[bool]:
    return [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]


VARIANTS: dict[str, tuple[Loop, Callable[[nn.Module], None]]] = {
    "undivided": (undivided, keep),
    "naive": (naive, keep),
    "naive_float32": (naive, deliver_float32),
    "anybatch": (anybatch, keep),
    "anybatch_float32": (anybatch, deliver_float32),
}


def main(*, quick: bool = False, out: Path = HERE) -> None:
    """Measure every variant and write results.json."""
    torch.set_num_threads(1)
    batch, steps = (MICRO_BATCH * 64 - 2, 1) if quick else (BATCH, STEPS)
    table = {
        loss: {
            name: variant(*VARIANTS[name], loss_fn, batch, steps)
            for name in track(VARIANTS, f"loss in {loss}", console=console)
        }
        for loss, loss_fn in LOSSES.items()
    }
    sizes = {"batch": batch, "micro_batch": MICRO_BATCH, "micro_batches": -(-batch // MICRO_BATCH)}
    results = {"seed": SEED, "environment": environment(), "sizes": sizes, "losses": table}
    write(out / "results.json", results)


if __name__ == "__main__":
    typer.run(main)
