"""Real fits by a Lightning Trainer that are looked at: before each step, and before each update."""

from __future__ import annotations

import copy
from inspect import signature
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from tests.oracle import assert_exact, state_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

N, CLASSES = 22, 5


class Net(pl.LightningModule):  # type: ignore[misc]
    """BatchNorm, and a loss that ignores some targets and weighs the others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES)
        )
        self.register_buffer("weight", torch.linspace(0.5, 2, CLASSES))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out

    def lose(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self(x)
        return F.cross_entropy(out, y, weight=self.weight, ignore_index=2), out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.lose(*batch)[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class FitRecorder(pl.Callback):  # type: ignore[misc]
    """What passes by."""

    def __init__(self) -> None:
        self.before: list[nn.Module] = []
        self.batches: list[Any] = []
        self.after: list[dict[str, Tensor]] = []
        self.outputs: list[Any] = []
        self.logged: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        del batch_idx
        fresh = copy.deepcopy(module)
        vars(fresh).pop("training_step", None)
        self.before.append(fresh)
        self.batches.append(batch)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.after.append(state_of(module, torch.zeros(())))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *arguments: Any) -> None:
        self.outputs.append(outputs)
        self.logged.append({k: v.clone() for k, v in trainer.callback_metrics.items()})


def rows(*, wide: bool = True) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(N, 1, 8, 8, generator=draw, dtype=torch.float64 if wide else torch.float32)
    return TensorDataset(x, torch.randint(0, CLASSES, (N,), generator=draw))


def fit(
    module: pl.LightningModule,
    *callbacks: pl.Callback,
    loader: Any = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> FitRecorder:
    """Fit a module, with a ragged last batch, and return what was seen."""
    recorder = FitRecorder()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "max_epochs": 2,
    }
    trainer = pl.Trainer(callbacks=[*callbacks, recorder], **(quiet | options))
    loader = DataLoader(rows(), batch_size=14) if loader is None else loader
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return recorder


def made(class_: type[pl.LightningModule] = Net) -> pl.LightningModule:
    torch.manual_seed(0)
    return class_().double()


def assert_full_batch(recorder: FitRecorder, *, least: int = 4) -> None:
    """Assert Law 1 for every step that was seen: one call of training_step on all rows."""
    assert len(recorder.after) >= least
    for i, (module, batch, got) in enumerate(
        zip(recorder.before, recorder.batches, recorder.after, strict=True)
    ):
        module.zero_grad()
        module.log = lambda *_a, **_k: None
        inputs = (batch, i)[: len(signature(module.training_step).parameters)]
        found = module.training_step(*inputs)
        loss = found["loss"] if isinstance(found, dict) else found
        loss.backward()
        want = state_of(module, loss)
        shown = recorder.outputs[i]["loss"]
        assert_exact(got | {"loss": shown}, want)
