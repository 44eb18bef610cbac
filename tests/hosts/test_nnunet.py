"""nnU-Net's own trainer on undivided batches is the truth, on a data set that it preprocesses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("nnunetv2", reason="needs nnunetv2: make hosts")

from benchmarks.hosts.nnunet import data
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.training.nnUNetTrainer.variants.network_architecture.nnUNetTrainerBN import (
    nnUNetTrainerBN,
)
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name
from tests.oracle import assert_exact

from anybatch.errors import NotExactError, NotYetError
from anybatch.integrations.nnunet import AnyBatchTrainer

pytestmark = pytest.mark.filterwarnings("default")  # the host's own
ROOT = Path(__file__).parents[2]
BATCH = 5


@pytest.fixture(scope="module", params=["2d", "3d_fullres"])
def prepared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, str]]:
    """A data set that nnU-Net has preprocessed, and the configuration."""
    folder = tmp_path_factory.mktemp(request.param)
    with data.places(folder), data.float64():
        data.prepare(folder, request.param)
        yield folder, request.param


def made(prepared: tuple[Path, str], base: type = nnUNetTrainer, **settings: Any) -> type:
    """Return a trainer with a budget."""
    bases = (AnyBatchTrainer,) if base is nnUNetTrainer else (AnyBatchTrainer, base)
    return type("Divided", bases, settings)


def state(trainer: Any, found: dict[str, Any]) -> dict[str, Tensor]:
    """Return loss, gradients and parameters after a step."""
    named = dict(trainer.network.named_parameters())
    kept = {f"{name}.grad": p.grad for name, p in named.items() if p.grad is not None}
    kept |= dict(trainer.network.state_dict())
    return {"loss": torch.as_tensor(found["loss"]), **kept}


def compared(ours: Any, theirs: Any, steps: int = 3) -> None:
    """Train both on the same batches of nnU-Net's loader, and compare all after each step."""
    for trainer in (ours, theirs):
        trainer.network.double()
    for batch in data.batches_of(theirs, steps):
        batch["data"] = batch["data"].double()
        want = state(theirs, theirs.train_step(deepcopy(batch)))
        assert_exact(state(ours, ours.train_step(deepcopy(batch))), want)
    assert ours.engine.last.micro_batches > 1


@pytest.mark.parametrize("batch_dice", [True, False])
@pytest.mark.parametrize("labels", ["classes", "ignore", "regions", "regions, ignore"])
def test_a_step_in_single_patches_is_the_undivided_step(
    prepared: tuple[Path, str], labels: str, *, batch_dice: bool
) -> None:
    plan = {"batch_size": BATCH, "batch_dice": batch_dice}
    ours = data.trainer_of(made(prepared, micro_batch=1), *prepared, labels, **plan)
    theirs = data.trainer_of(nnUNetTrainer, *prepared, labels, **plan)
    assert len(theirs.loss.weight_factors) == 3  # deep supervision
    compared(ours, theirs)


class ClearsBeforeBackward(nnUNetTrainer):
    """A step in torch's usual order."""

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        loss = self.loss(self.network(batch["data"]), batch["target"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}


class Weighs(nnUNetTrainer):
    """Half of the loss, to a power, and a penalty; gradients of two steps are added."""

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        loss = (0.5 * self.loss(self.network(batch["data"]), batch["target"])).exp()
        loss = loss + 1e-2 * sum(p.square().sum() for p in self.network.parameters())
        loss.backward()
        return {"loss": loss.detach()}


@pytest.mark.parametrize("base", [ClearsBeforeBackward, Weighs])
def test_a_step_in_another_order_has_the_gradient_of_its_loss(
    prepared: tuple[Path, str], base: type
) -> None:
    folder, configuration = prepared
    ours, theirs = (
        data.trainer_of(kind, folder, configuration, "classes", batch_size=BATCH, batch_dice=True)
        for kind in (made(prepared, base, micro_batch=2), base)
    )
    compared(ours, theirs)


@pytest.mark.parametrize("base", [nnUNetTrainer, nnUNetTrainerBN])
def test_a_step_in_a_budget_is_the_undivided_step(prepared: tuple[Path, str], base: type) -> None:
    plan = {"batch_size": BATCH, "batch_dice": True}
    memory = "2MiB" if prepared[1] == "2d" else "5MiB"
    ours = data.trainer_of(made(prepared, base, memory=memory), *prepared, "ignore", **plan)
    compared(ours, data.trainer_of(base, *prepared, "ignore", **plan))
    assert ours.engine.plan.memory.budget == (2 << 20 if prepared[1] == "2d" else 5 << 20)


def test_a_share_of_the_free_memory_is_a_budget(prepared: tuple[Path, str]) -> None:
    plan = {"batch_size": BATCH, "batch_dice": True}
    ours = data.trainer_of(made(prepared, memory="80%"), *prepared, "ignore", **plan)
    for batch in data.batches_of(ours, 1):
        ours.train_step(batch)
    assert ours.engine.plan.memory.source.endswith("80 % of it")


def test_the_scaler_sees_the_full_batch(prepared: tuple[Path, str]) -> None:
    plan = {"batch_size": BATCH, "batch_dice": True}
    ours = data.trainer_of(made(prepared, micro_batch=2), *prepared, **plan)
    theirs = data.trainer_of(nnUNetTrainer, *prepared, **plan)
    for trainer in (ours, theirs):
        trainer.grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    compared(ours, theirs)
    assert ours.grad_scaler.state_dict() == theirs.grad_scaler.state_dict()


def test_validation_in_micro_batches_is_that_of_the_batch(prepared: tuple[Path, str]) -> None:
    plan = {"batch_size": BATCH, "batch_dice": True}
    ours = data.trainer_of(made(prepared, micro_batch=2), *prepared, "ignore", **plan)
    theirs = data.trainer_of(nnUNetTrainer, *prepared, "ignore", **plan)
    compared(ours, theirs, 1)
    (batch,) = data.batches_of(theirs, 1)
    batch["data"] = batch["data"].double()
    rows: list[int] = []
    ours.network.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    with torch.no_grad():
        for trainer in (ours, theirs):
            trainer.on_validation_epoch_start()
        got, want = (one.validation_step(deepcopy(batch)) for one in (ours, theirs))
    assert rows == [2, 2, 1]
    assert_exact(*({name: torch.as_tensor(one[name]) for name in one} for one in (got, want)))


def test_a_run_trains_validates_and_predicts_by_the_name_of_its_class(
    prepared: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "recipes" / "nnunet.md").read_text()
    (found,) = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "budgets.py").write_text(found)
    monkeypatch.setenv("nnUNet_extTrainer", str(tmp_path))
    trainer = recursive_find_trainer_class_by_name("Trainer6GiB")
    assert issubclass(trainer, AnyBatchTrainer)
    assert trainer.memory == "6GiB"
    run = data.trainer_of(trainer, *prepared, batch_size=BATCH, batch_dice=True)
    run.num_epochs, run.num_iterations_per_epoch, run.num_val_iterations_per_epoch = 1, 2, 1
    run.run_training()
    assert run.engine.last.samples == BATCH
    assert (Path(run.output_folder) / "checkpoint_final.pth").exists()


def test_a_replaced_optimizer_has_an_engine_of_its_own(prepared: tuple[Path, str]) -> None:
    ours = data.trainer_of(
        made(prepared, micro_batch=2), *prepared, batch_size=BATCH, batch_dice=True
    )
    first, second = data.batches_of(ours, 2)
    ours.train_step(first)
    engine = ours.engine
    ours.optimizer, ours.lr_scheduler = ours.configure_optimizers()
    ours.train_step(second)
    assert ours.engine is not engine


class Measures(nnUNetTrainer):
    """A trainer whose step looks at the outputs."""

    look: Any = staticmethod(lambda output: output[0])

    def train_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        output = self.network(batch["data"])
        return {"loss": self.loss(self.look(output), batch["target"])}


@pytest.mark.parametrize(
    ("look", "message"),
    [
        (lambda output: output[0], r"it used \[0\] of it"),
        (lambda output: output.shape, r"it used \.shape of it"),
        (lambda _: torch.zeros(()), "another value"),
    ],
)
def test_a_step_that_uses_the_outputs_is_refused(
    prepared: tuple[Path, str], look: Any, message: str
) -> None:
    trainer = made(prepared, Measures, micro_batch=2, look=staticmethod(look))
    ours = data.trainer_of(trainer, *prepared, batch_size=BATCH, batch_dice=True)
    with pytest.raises(NotExactError, match=message):
        ours.train_step(data.batches_of(ours, 1)[0])
    assert isinstance(ours.network, torch.nn.Module)


def test_several_gpus_are_refused() -> None:
    ours = AnyBatchTrainer.__new__(AnyBatchTrainer)
    ours.is_ddp = True
    for start in (ours.initialize, lambda: ours.train_step({})):
        with pytest.raises(NotYetError, match="trains on one GPU"):
            start()
