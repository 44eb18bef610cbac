"""`AnyBatch` in the loop of ultralytics, beside its own trainer, on images and labels on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

os.environ.setdefault("YOLO_OFFLINE", "1")
pytest.importorskip("ultralytics", reason="needs ultralytics: make hosts")

from benchmarks.hosts.ultralytics.run import NETWORKS, row
from PIL import Image
from tests.oracle import error_of, tolerance
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.nn.tasks import DetectionModel

from anybatch.errors import NotYetError
from anybatch.integrations.ultralytics import AnyBatch

pytestmark = pytest.mark.filterwarnings("default")

SINGLE = 1e-3
"""Bound in float32, which the trainer computes in: the noise of one network in two sizes."""
PLAIN: dict[str, Any] = dict.fromkeys(
    ("mosaic", "fliplr", "hsv_h", "hsv_s", "hsv_v", "scale", "translate", "erasing"), 0.0
)
PLAIN |= {"workers": 0, "device": "cpu", "optimizer": "SGD", "plots": False, "val": False}
PLAIN |= {"amp": False, "imgsz": 64, "warmup_epochs": 0, "exist_ok": True, "verbose": False}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (root / "images").mkdir()
    (root / "labels").mkdir()
    for i in range(11):
        pixels = draw.integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "images" / f"{i}.png")
        boxes = [[draw.integers(2), *draw.uniform(0.3, 0.6, 4)] for _ in range(i % 4)]
        text = "\n".join(" ".join(f"{value:.4f}" for value in box) for box in boxes)
        (root / "labels" / f"{i}.txt").write_text(text)
    (root / "data.yaml").write_text(
        f"path: {root}\ntrain: images\nval: images\nnames: {{0: a, 1: b}}\n"
    )
    return root


def train(kind: Any, data: Path, batch: int, nbs: int = 6, **options: Any) -> Any:
    """Return the trainer after an epoch, with the gradients of each step."""

    class Recording(kind):  # type: ignore[misc]
        steps: ClassVar[list[dict[str, torch.Tensor]]] = []

        def optimizer_step(self) -> None:
            named = self.model.named_parameters()
            self.steps.append({n: p.grad.clone() for n, p in named if p.grad is not None})
            super().optimizer_step()

    torch.manual_seed(0)
    yolo, words = YOLO("yolov8n.yaml"), PLAIN | options
    words |= {"batch": batch, "nbs": nbs, "epochs": 1, "project": str(data / "runs")}
    yolo.train(data=str(data / "data.yaml"), trainer=Recording, **words)
    return yolo.trainer


class Ours(AnyBatch, DetectionTrainer):  # type: ignore[misc]
    micro_batch = 2


class Budget(AnyBatch, DetectionTrainer):  # type: ignore[misc]
    memory = "38MiB"


class Share(AnyBatch, DetectionTrainer):  # type: ignore[misc]
    memory = "80%"


def worst(got: Any, want: Any) -> float:
    assert len(got.steps) == len(want.steps) == 2  # the last batch is ragged
    return max(error_of(got.steps[0], want.steps[0]).values())  # the second has other parameters


@pytest.mark.parametrize("kind", [Ours, Budget])
def test_a_step_is_that_of_the_undivided_batch(kind: Any, data: Path) -> None:
    want, got = train(DetectionTrainer, data, 6), train(kind, data, 6)
    assert got.engine.last.micro_batches > 1
    assert worst(got, want) < SINGLE
    assert {k: float(v) for k, v in got.tloss.items()} == pytest.approx(
        {k: float(v) for k, v in want.tloss.items()}, rel=SINGLE
    )
    accumulated = train(DetectionTrainer, data, 2)
    assert max(error_of(accumulated.steps[0], want.steps[0]).values()) > 0.1
    assert "forward" not in vars(got.model)  # it is saved and copied as it was


def test_a_share_of_the_free_memory_is_a_budget(data: Path) -> None:
    got = train(Share, data, 6)
    assert got.engine.plan.memory.source.endswith("80 % of it")


def test_every_network_is_exact() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for name in NETWORKS:
            found = row(name, 0)
            assert found["exact"], name
            assert found["ours"] <= tolerance(), name
            assert found["own"] > 0.1, name
    finally:
        torch.set_default_dtype(before)


def test_accumulation_is_refused(data: Path) -> None:
    with pytest.raises(ValueError, match="set batch=8, nbs=8"):
        train(Ours, data, 4, nbs=8)


def test_a_call_that_comes_between_is_the_models_own(data: Path) -> None:
    class Looks(Ours):
        def preprocess_batch(self, batch: Any) -> Any:
            batch = super().preprocess_batch(batch)
            self.seen = self.model(batch["img"])["scores"].shape  # as after an interrupt
            assert "forward" not in vars(self.model)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(Looks, data, 6)


def test_a_loss_of_its_own_is_refused() -> None:
    class Weighted(DetectionModel):  # type: ignore[misc]
        def loss(self, batch: Any, preds: Any = None) -> Any:
            loss, items = super().loss(batch, preds)
            return 4 * loss, items

    trainer: Any = type("Trainer", (AnyBatch,), {})()
    trainer.args = None
    trainer.model = Weighted("yolov8n.yaml", nc=2, verbose=False)
    with pytest.raises(NotYetError, match="Weighted has a loss"):
        trainer.preprocess_batch({})


@pytest.mark.parametrize(("devices", "rank"), [(2, -1), (0, 1)])
def test_several_processes_are_refused_before_they_start(
    monkeypatch: pytest.MonkeyPatch, devices: int, rank: int
) -> None:
    """Of GPUs that ultralytics would start, and of torchrun on the CPU, which it does not see."""
    monkeypatch.setattr("ultralytics.utils.RANK", rank)
    trainer: Any = type("Trainer", (AnyBatch,), {"world_size": devices})()
    trainer.args = type("Args", (), {"device": "0,1" if devices else "cpu"})
    with pytest.raises(NotYetError, match="trains in one process, on one device"):
        trainer.train()


def test_another_task_is_refused() -> None:
    class Other(AnyBatch):
        accumulate, batch_size = 1, 4

    trainer: Any = Other()
    trainer.model = DetectionModel("yolov8n.yaml", nc=2, verbose=False)
    trainer.args = type("Args", (), {"nbs": 4, "task": "classify", "compile": False})
    with pytest.raises(NotYetError, match="task=classify"):
        trainer.preprocess_batch({})
