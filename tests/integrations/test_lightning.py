"""`FullBatch`: a step of a Lightning Trainer, whatever its batch is split into.

Real Trainers and modules; the truth is one call of ``training_step`` on the undivided batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.oracle import assert_exact, state_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

import anybatch
from anybatch.errors import BudgetError, LossError, NotYetError

pl = pytest.importorskip(
    "lightning.pytorch", reason="pip install 'anybatch[lightning]' is needed for these tests"
)

from lightning.pytorch.callbacks import (  # noqa: E402
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from tests.integrations.fits import Net, assert_full_batch, fit, made, rows  # noqa: E402
from torchmetrics.classification import MulticlassAccuracy  # noqa: E402

from anybatch.integrations.lightning import FullBatch, full_batch_loss  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]


@pytest.mark.parametrize("micro_batch", [1, 4, 14])
def test_gradients_are_those_of_the_undivided_batch(micro_batch: int) -> None:
    full = FullBatch(micro_batch=micro_batch)
    assert_full_batch(fit(made(), full))
    assert full.engine is not None
    assert full.engine.last is not None
    assert full.engine.last.samples == 8  # the last one is ragged


def test_a_training_is_that_of_the_plain_trainer() -> None:
    options: dict[str, Any] = {"max_epochs": 3, "gradient_clip_val": 0.05}
    own, ours = made(Scheduled), made(Scheduled)
    one, other = fit(own, **options), fit(ours, FullBatch(micro_batch=3), **options)
    for mine, theirs in zip(other.after, one.after, strict=True):
        assert_exact(mine, theirs)
    assert_exact(ours.state_dict(), own.state_dict())


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_in_memory_that_is_less_than_the_batch_needs() -> None:
    full = FullBatch(memory="60KiB")
    assert_full_batch(fit(made(), full))
    assert full.engine is not None
    assert full.engine.plan is not None
    assert full.engine.plan.micro_batch < 14


def test_a_share_of_the_free_memory_is_a_budget() -> None:
    full = FullBatch(memory="80%")
    assert_full_batch(fit(made(), full))
    assert full.engine is not None
    assert full.engine.plan is not None
    assert full.engine.plan.memory is not None
    assert full.engine.plan.memory.source.endswith("80 % of it")


def test_too_little_memory_is_said_before_anything_runs() -> None:
    module = made()
    with pytest.raises(BudgetError):
        fit(module, FullBatch(memory="10KiB"))
    assert not vars(module).keys() & {"training_step", "log"}


class Dicts(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch["name"] == "digits"
        return self.lose(batch["x"][0], batch["y"])[0]


class Lists(Net):
    def training_step(self, batch: Any) -> Any:
        x, (y, ids) = batch
        assert len(ids) == len(x)
        return {"loss": self.lose(x, y)[0]}


class OwnStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch)
        return F.mse_loss(out, batch[:, 0, 0, :5])


TREES = {
    "dict": (Dicts, lambda x, y: {"x": (x,), "y": y, "name": "digits"}),
    "nested": (Lists, lambda x, y: [x, (y, [str(i) for i in range(len(y))])]),
    "tensor": (OwnStep, lambda x, y: x),
}


@pytest.mark.parametrize("name", TREES)
def test_any_tree_is_a_batch(name: str) -> None:
    variant, tree = TREES[name]

    def collate(items: list[Any]) -> Any:
        x, y = zip(*items, strict=True)
        return tree(torch.stack(x), torch.stack(y))

    loader = DataLoader(rows(), batch_size=14, collate_fn=collate)
    assert_full_batch(fit(made(variant), FullBatch(micro_batch=4), loader=loader))


class Telling(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, out = self.lose(*batch)
        right = (out.argmax(1) == batch[1]).double()
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        self.log("detached", loss.detach())
        self.log_dict({"accuracy": right.mean(), "number": 3.0}, on_step=True, on_epoch=True)
        self.log("right", right.sum(), reduce_fx="sum")
        self.log("most", right.max(), reduce_fx="max")
        return {"loss": loss, "out": out, "mean": right.mean(), "of": "digits"}


@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"memory": "60KiB"}])
def test_what_is_logged_and_returned_is_that_of_the_full_batch(how: dict[str, Any]) -> None:
    one, other = fit(made(Telling)), fit(made(Telling), FullBatch(**how))
    for mine, theirs in zip(other.logged, one.logged, strict=True):
        assert mine.keys() == theirs.keys()
        assert_exact(mine, theirs)
    for mine, theirs in zip(other.outputs, one.outputs, strict=True):
        assert mine.pop("of") == theirs.pop("of")
        assert_exact(mine, {k: v.detach() for k, v in theirs.items()})


class Measured(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(5, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, out = self.lose(*batch)
        self.accuracy(out, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss


@pytest.mark.large(few=1)
@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"memory": "60KiB"}])
def test_a_metric_sees_each_row_once(how: dict[str, Any]) -> None:
    one, other = Epochs(), Epochs()
    fit(made(Measured), one)
    fit(made(Measured), FullBatch(**how), other)
    assert one.accuracy == other.accuracy


class Epochs(pl.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.accuracy: list[float] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.accuracy.append(float(module.accuracy.compute()))


@pytest.mark.parametrize(
    ("options", "callbacks", "error", "match"),
    [
        ({"accumulate_grad_batches": 4}, [], ValueError, "a step is one batch already.* is 4"),
        ({}, [GradientAccumulationScheduler({1: 2})], ValueError, "is scheduled: leave it out"),
    ],
)
def test_what_changes_the_batch_is_refused(
    options: dict[str, Any], callbacks: list[Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        fit(made(), FullBatch(), *callbacks, **options)


class Loaded(Net):
    batch_size = 4

    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=self.batch_size)


def test_a_batch_size_finder_is_refused() -> None:
    trainer = pl.Trainer(callbacks=[BatchSizeFinder(), FullBatch()], logger=False, max_epochs=1)
    with pytest.raises(ValueError, match="BatchSizeFinder reduces it until it fits"):
        trainer.fit(made(Loaded))


class Iterated(Net):
    def training_step(self, dataloader_iter: Any) -> Any:
        return self.lose(*next(dataloader_iter)[0])[0]


def test_what_cannot_be_yet_is_refused() -> None:
    with pytest.raises(NotYetError, match=r"let it have \(batch, batch_idx\)"):
        fit(made(Iterated), FullBatch())
    compiled = torch.compile(made())
    with pytest.raises(NotYetError, match="give the Trainer the module without"):
        fit(compiled, FullBatch())


class Coupled(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0]).softmax(1)
        return 1 - (out * out).sum() / out.sum()


def evenness(out: Tensor) -> Tensor:
    return 1 - (out * out).sum() / out.sum()


class Marked(Net):
    """Says of the same that samples meet in it, beside another term; it logs both."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, out = self.lose(*batch)
        meets = anybatch.coupled(evenness)(out.softmax(1))
        self.log("meets", meets)
        return {"loss": 0.5 * loss + meets, "meets": meets.detach()}


class MarkedByHand(Marked):
    """The same in manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def both(self, batch: Any) -> Any:
        return super().training_step(batch, 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = full_batch_loss(self, self.both, batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss}


@pytest.mark.product
@pytest.mark.parametrize("class_", [Marked, MarkedByHand])
@pytest.mark.parametrize("micro_batch", [1, 4, 14])
def test_a_loss_that_is_marked_means_the_full_batch(class_: type[Net], micro_batch: int) -> None:
    observed = fit(made(class_), FullBatch(micro_batch=micro_batch))
    assert len(observed.after) == 4
    for i, (module, batch) in enumerate(zip(observed.before, observed.batches, strict=True)):
        module.zero_grad()
        loss, out = module.lose(*batch)
        meets = evenness(out.softmax(1))
        loss = 0.5 * loss + meets
        loss.backward()
        assert_exact(observed.after[i], state_of(module, torch.zeros(())))
        shown = {"loss": observed.outputs[i]["loss"], "meets": observed.logged[i]["meets"]}
        assert_exact(shown, {"loss": loss.detach(), "meets": meets.detach()})


class Nothing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return "nothing"


def test_a_loss_that_is_not_recognised_is_refused_and_leaves_no_trace() -> None:
    wrong = (Coupled, "weighted sum of torch's own"), (Nothing, "must return its loss")
    for variant, match in wrong:
        module = made(variant)
        before = {n: p.clone() for n, p in module.state_dict().items()}
        with pytest.raises(LossError, match=match):
            fit(module, FullBatch(micro_batch=4))
        assert not vars(module).keys() & {"training_step", "log"}
        assert all(torch.equal(p, before[n]) for n, p in module.state_dict().items())
        assert all(p.grad is None for p in module.parameters())


class Own(Net):
    def backward(self, loss: Tensor, *arguments: Any, **named: Any) -> None:
        (loss * 2).backward()


def test_a_backward_of_ones_own_keeps_its_meaning() -> None:
    one, other = fit(made(Own)), fit(made(Own), FullBatch(micro_batch=4))
    for mine, theirs in zip(other.after, one.after, strict=True):
        assert_exact(mine, theirs)


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.lose(*batch)[0])


def test_callbacks_loops_and_limits_are_lightnings_own(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [FullBatch(micro_batch=4)]):
        module, loader = made(Validated), DataLoader(rows(), batch_size=14)
        stop = EarlyStopping("val_loss", mode="max", patience=1)
        trainer = pl.Trainer(
            callbacks=[*callbacks, stop],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            max_epochs=9,
            limit_train_batches=1,
            default_root_dir=tmp_path / str(len(callbacks)),
        )
        trainer.fit(module, loader, loader)
        found.append((trainer.global_step, trainer.current_epoch, module.state_dict()))
    assert found[0][:2] == found[1][:2]
    assert_exact(found[1][2], found[0][2])


@pytest.mark.large(few=1)
@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"memory": "60KiB"}])
def test_a_run_that_is_resumed_is_the_same_bit_for_bit(tmp_path: Path, how: dict[str, Any]) -> None:
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    through, again = made(), made()
    full = FullBatch(**how)
    fit(through, full, keep, enable_checkpointing=True, max_epochs=14)
    resumed = FullBatch(**how)  # the fastest size has been found by then
    fit(again, resumed, ckpt_path=tmp_path / "epoch=11.ckpt", max_epochs=14)
    assert resumed.engine is not None
    assert full.engine is not None
    assert resumed.engine.micro_batch == full.engine.micro_batch
    assert all(torch.equal(p, again.state_dict()[n]) for n, p in through.state_dict().items())


def test_mixed_precision_is_that_of_the_trainer() -> None:
    """bfloat16 rounds apart in parts: no further from float32 than the undivided batch."""
    observed = fit(
        *(made().float(), FullBatch(micro_batch=4)),
        loader=DataLoader(rows(wide=False), batch_size=14),
        precision="bf16-mixed",
    )
    for module, (x, y), got in zip(observed.before, observed.batches, observed.after, strict=True):
        single, exact = [state(module, x, y, mixed) for mixed in (True, False)]
        for name, want in exact.items():
            if name.endswith("grad"):
                bound = max(4 * float((single[name] - want).abs().max()), 1e-3)
                assert float((got[name] - want).abs().max()) <= bound, name


def state(module: Any, x: Tensor, y: Tensor, mixed: bool) -> dict[str, Tensor]:
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = module.lose(x, y)[0]
    loss.backward()
    return state_of(module, loss)


class Gan(pl.LightningModule):  # type: ignore[misc]
    """Two optimizers, each for its own network, with BatchNorm in both."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 64))
        self.critic = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.full = True

    def of_critic(self, rows: Any) -> Tensor:
        x, z = rows
        real, made_up = self.critic(x.flatten(1)), self.critic(self.maker(z).detach())
        loss = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        loss = loss + F.binary_cross_entropy_with_logits(made_up, torch.zeros_like(made_up))
        self.log("critic", loss)
        return loss

    def of_maker(self, rows: Any) -> Tensor:
        made_up = self.critic(self.maker(rows))
        return F.binary_cross_entropy_with_logits(made_up, torch.ones_like(made_up))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        z = torch.linspace(-1, 1, len(x) * 3, dtype=x.dtype).reshape(-1, 3).sin()
        for optimizer, lose, inputs in zip(
            self.optimizers(), (self.of_critic, self.of_maker), ((x, z), z), strict=True
        ):
            self.toggle_optimizer(optimizer)
            loss = full_batch_loss(self, lose, inputs) if self.full else lose(inputs)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.critic, self.maker)]


class Plain(Gan):
    def __init__(self) -> None:
        super().__init__()
        self.full = False


@pytest.mark.large(few=1)
@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"memory": "80KiB"}])
def test_manual_optimisation_of_two_networks(how: dict[str, Any]) -> None:
    one = fit(made(Plain), max_epochs=1)
    other = fit(made(Gan), FullBatch(**how), max_epochs=1)
    assert len(one.after) == len(other.after) == 4
    for mine, theirs in zip(other.after, one.after, strict=True):
        assert_exact(mine, theirs)
    for logs, truth in zip(other.logged, one.logged, strict=True):
        assert_exact(logs, truth)


def test_the_backward_of_a_loss_in_one_piece_is_refused() -> None:
    match = r"(?s)one piece.*self.manual_backward\(full_batch_loss\(self, self.my_loss, batch\)\)"
    with pytest.raises(ValueError, match=match):
        fit(made(Plain), FullBatch())


class Lambda(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        full_batch_loss(self, lambda rows: self.of_maker(rows), batch)


def test_full_batch_loss_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"def my_loss\(self, rows\)"):
        fit(made(Lambda), FullBatch())
    with pytest.raises(ValueError, match=r"Trainer\(callbacks=\[FullBatch\(\)\]\)"):
        fit(made(Gan))


def test_a_loss_is_handed_over_once() -> None:
    class Twice(Net):
        def backward(self, loss: Tensor, *arguments: Any, **named: Any) -> None:
            loss.backward(retain_graph=True)
            loss.backward()

    with pytest.raises(RuntimeError, match="delivered once"):
        fit(made(Twice), FullBatch(micro_batch=4))
