"""Networks of ultralytics with their criteria: its own accumulation, and ours, in float64.

The images of a batch have up to four objects, and one has none. The truth is the criterion of the
undivided batch. Accumulation is that of the trainer of ultralytics for ``batch`` below ``nbs``: it
adds up the gradients of smaller batches, each divided by its own scores and normalised by its own
statistics.
"""

import copy
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from anybatch import Engine
from anybatch.integrations.ultralytics import KEYED, DetectionLoss, labels_of
from anybatch.tools.exactness import error_of
from benchmarks.environment import environment
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEEDS = (0, 1)
IMAGES, MICRO_BATCH, SIDE, CLASSES = 7, 3, 64, 2
OBJECTS = (0, 0, 1, 3, 3, 3, 4, 6)
"""The image of each object."""

NETWORKS = {
    "yolov8n": "DetectionModel",
    "yolov10n": "DetectionModel",
    "yolo11n": "DetectionModel",
    "yolo12n": "DetectionModel",
    "yolo26n": "DetectionModel",
    "yolov8n-seg": "SegmentationModel",
    "yolo11n-seg": "SegmentationModel",
    "yolov8n-pose": "PoseModel",
    "yolov8n-obb": "OBBModel",
}
Batch = dict[str, Any]


def made(name: str, seed: int) -> tuple[nn.Module, Batch]:
    """Return a network without trained weights, and a batch for it."""
    from ultralytics.cfg import get_cfg
    from ultralytics.nn import tasks

    torch.manual_seed(seed)
    kind = NETWORKS[name]
    model = getattr(tasks, kind)(f"{name}.yaml", nc=CLASSES, verbose=False)
    model.args = get_cfg()
    index, count = torch.tensor(OBJECTS), len(OBJECTS)
    batch = {
        "img": torch.rand(IMAGES, 3, SIDE, SIDE),
        "batch_idx": index,
        "cls": torch.randint(CLASSES, (count, 1)).to(torch.get_default_dtype()),
        "bboxes": torch.rand(count, 4) * 0.4 + 0.3,
    }
    if kind == "OBBModel":
        batch["bboxes"] = torch.cat([batch["bboxes"], torch.rand(count, 1)], 1)
    if kind == "SegmentationModel":
        masks = torch.randint(0, 4, (IMAGES, SIDE // 4, SIDE // 4))
        batch["masks"] = masks.to(torch.get_default_dtype())
    if kind == "PoseModel":
        batch["keypoints"] = torch.rand(count, 17, 3)
    return model.train(), batch


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients, and the statistics of BatchNorm."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: buffer for name, buffer in model.named_buffers() if "running" in name}


def accumulated(model: Any, batch: Batch) -> None:
    """Add up the gradients of smaller batches, as the trainer does."""
    for begin in range(0, IMAGES, MICRO_BATCH):
        end = min(begin + MICRO_BATCH, IMAGES)
        objects = (batch["batch_idx"] >= begin) & (batch["batch_idx"] < end)
        part = {
            name: rows[objects] if name in (*KEYED, "batch_idx") else rows[begin:end]
            for name, rows in batch.items()
        }
        model.loss(part | {"batch_idx": part["batch_idx"] - begin})[0].sum().backward()


def row(name: str, seed: int) -> dict[str, Any]:
    """Return the errors of both ways."""
    model, batch = made(name, seed)
    truth: Any
    truth, own, ours = (copy.deepcopy(model) for _ in range(3))
    truth.loss(dict(batch))[0].sum().backward()
    accumulated(own, batch)
    engine = Engine(ours, DetectionLoss(ours), micro_batch=MICRO_BATCH)
    engine.backward(batch["img"], labels_of(batch))
    want = gradients(truth)
    assert engine.plan is not None
    return {
        "name": name,
        "seed": seed,
        "own": max(error_of(gradients(own), want).values()),
        "ours": max(error_of(gradients(ours), want).values()),
        "mechanism": engine.plan.mechanism,
        "exact": bool(engine.plan.exact),
    }


def run(
    out: Annotated[Path, typer.Option(help="Folder for results.json.")] = HERE,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="One network, one seed.")] = False,
) -> None:
    """Measure and write results.json."""
    import ultralytics

    torch.set_num_threads(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # the criteria make tensors of the default dtype
    rows = []
    try:
        for name in list(NETWORKS)[: 1 if quick else None]:
            for seed in SEEDS[: 1 if quick else None]:
                console.print(f"{name}, seed {seed}")
                rows.append(row(name, seed))
    finally:
        torch.set_default_dtype(before)
    facts = environment() | {"threads": 1, "ultralytics": ultralytics.__version__}
    write(out / "results.json", {"environment": facts, "seeds": SEEDS, "rows": rows})


if __name__ == "__main__":
    typer.run(run)
