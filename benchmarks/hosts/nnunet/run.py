"""nnU-Net's plans, each trained by hand and by `AnyBatchTrainer`, in patches one by one.

The truth is nnU-Net's own trainer on the undivided batch, in float64; the error is that of the
gradient before clipping, by `anybatch.tools.exactness`. By hand is what people write: the mean of
the losses of all micro-batches.
"""

import io
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from anybatch.tools.exactness import error_of
from benchmarks.environment import environment
from benchmarks.hosts.nnunet import data
from benchmarks.results import write

HERE = Path(__file__).parent
BATCH = 5
SEEDS = 3
ROWS = [
    ("InstanceNorm", "classes", False),
    ("InstanceNorm", "classes", True),
    ("InstanceNorm", "ignore", False),
    ("InstanceNorm", "ignore", True),
    ("InstanceNorm", "regions", True),
    ("InstanceNorm", "regions, ignore", True),
    ("BatchNorm", "classes", True),
]


def gradients(trainer: Any, run: Any) -> dict[str, Tensor]:
    """Return the gradients that `run` adds, without those before."""
    trainer.network.train()
    trainer.optimizer.zero_grad()
    run()
    named = trainer.network.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def by_hand(trainer: Any, inputs: Tensor, target: list[Tensor]) -> None:
    """Add the gradient of the mean of the losses of single patches."""
    for i in range(len(inputs)):
        output = trainer.network(inputs[i : i + 1])
        (trainer.loss(output, [one[i : i + 1] for one in target]) / len(inputs)).backward()


def row(folder: Path, configuration: str, norm: str, labels: str, dice: bool) -> dict[str, Any]:  # noqa: FBT001
    """Return the errors of both on batches of nnU-Net's own loader."""
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
    from nnunetv2.training.nnUNetTrainer.variants.network_architecture.nnUNetTrainerBN import (
        nnUNetTrainerBN,
    )

    from anybatch.integrations.nnunet import AnyBatchTrainer

    base: Any = nnUNetTrainer if norm == "InstanceNorm" else nnUNetTrainerBN
    bases = (AnyBatchTrainer,) if base is nnUNetTrainer else (AnyBatchTrainer, base)
    trainer = data.trainer_of(
        type("Divided", bases, {"micro_batch": 1}),
        *(folder, configuration, labels),
        batch_size=BATCH,
        batch_dice=dice,
    )
    trainer.network.double()
    engine = trainer.build_engine()
    errors: dict[str, list[float]] = {"by hand": [], "anybatch": []}
    for batch in data.batches_of(trainer, SEEDS):
        inputs, target = batch["data"].double(), batch["target"]

        def whole(x: Tensor = inputs, y: Any = target) -> None:
            trainer.loss(trainer.network(x), y).backward()

        want = gradients(trainer, whole)
        hand = gradients(trainer, lambda x=inputs, y=target: by_hand(trainer, x, y))
        ours = gradients(trainer, lambda x=inputs, y=target: engine.backward(x, y))
        errors["by hand"].append(max(error_of(hand, want).values()))
        errors["anybatch"].append(max(error_of(ours, want).values()))
    mechanism = None if engine.plan is None else engine.plan.mechanism
    found = {"configuration": configuration, "norm": norm, "labels": labels, "batch_dice": dice}
    return {**found, "mechanism": mechanism, "errors": errors}


def main(
    *,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
) -> None:
    """Train every plan both ways, and write results.json."""
    rows = []
    for configuration in ("2d", "3d_fullres"):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            with data.places(folder), data.float64(), redirect_stdout(io.StringIO()):
                data.prepare(folder, configuration)
                rows += [row(folder, configuration, *one) for one in ROWS]
    found = {"rows": rows, "batch": BATCH, "micro_batch": 1, "batches": SEEDS, "seed": 0}
    write(out / "results.json", {**found, "environment": environment()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
