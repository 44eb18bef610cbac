"""Hooks of a LightningModule, batches that it skips, and accumulation that is set on the way.

Each is what Lightning alone does with the undivided batch, or is refused.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import coupled
from anybatch.errors import LossError, NotExactError

pl = pytest.importorskip(
    "lightning.pytorch", reason="pip install 'anybatch[lightning]' is needed for these tests"
)

from lightning.pytorch.callbacks import GradientAccumulationScheduler  # noqa: E402
from tests.integrations.fits import Net, assert_full_batch, fit, made  # noqa: E402
from torchmetrics import MeanMetric, MeanSquaredError  # noqa: E402

from anybatch.integrations.lightning import FullBatch  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`"),
]


class During(pl.Callback):  # type: ignore[misc]
    """Sets accumulation at a hook."""

    def __init__(self, hook: str, step: int = 0) -> None:
        def act(trainer: Any, module: Any, *arguments: Any) -> None:
            if trainer.global_step == step:
                trainer.accumulate_grad_batches = 4

        setattr(self, hook, act)


class Sets(Net):
    def on_train_epoch_start(self) -> None:
        self.trainer.accumulate_grad_batches = 4


class Late(pl.Callback):  # type: ignore[misc]
    """Brings a schedule of accumulation when training has begun."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.callbacks.append(GradientAccumulationScheduler({1: 4}))


LATER: dict[str, tuple[Any, list[Any], int, str]] = {
    "on_train_start": (Net, [During("on_train_start")], 0, "batches is 4: leave it out"),
    "on_epoch": (Net, [During("on_train_epoch_start")], 0, "batches is 4: leave it out"),
    "on_batch": (Net, [During("on_train_batch_start")], 0, "batches is 4: leave it out"),
    "next batch": (Net, [During("on_train_batch_end", 1)], 1, "batches is 4: leave it out"),
    "the module": (Sets, [], 0, "batches is 4: leave it out"),
    "a schedule": (Net, [Late()], 0, "is scheduled: leave it out"),
}


@pytest.mark.large(few=3)
@pytest.mark.parametrize("way", LATER)
def test_accumulation_that_is_set_later_is_refused_at_its_step(way: str) -> None:
    variant, callbacks, steps, match = LATER[way]
    module = made(variant)
    with pytest.raises(ValueError, match=match):
        fit(module, FullBatch(micro_batch=3), *callbacks)
    assert module.trainer.global_step == steps
    assert all(p.grad is None or not p.grad.any() for p in module.parameters()) or steps


class Backward(Net):
    def backward(self, loss: Tensor, *arguments: Any, **named: Any) -> None:
        (loss / 3).backward()


class Before(Net):
    def on_before_backward(self, loss: Tensor) -> None:
        self.shown = float(loss.detach())


class After(Net):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.grad *= 2


class BeforeStep(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1e-2)


class Stepping(Net):
    def optimizer_step(self, epoch: int, batch: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        self.body[0].weight.data.mul_(0.9)


class ByHand(Net):
    """A pattern of Lightning's pages: the closure in every batch, the update in every second."""

    def optimizer_step(self, epoch: int, batch: int, optimizer: Any, closure: Any) -> None:
        if batch % 2:
            optimizer.step(closure=closure)
        else:
            closure()


class Zeroing(Net):
    """Gradients that are never emptied add up."""

    def optimizer_zero_grad(self, epoch: int, batch: int, optimizer: Any) -> None:
        pass


class BeforeZero(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.body[0].weight.grad is not None:
            self.body[0].weight.data.sub_(self.body[0].weight.grad)


class Clipping(Net):
    def configure_gradient_clipping(self, optimizer: Any, *arguments: Any, **named: Any) -> None:
        self.clip_gradients(optimizer, 1e-2, "norm")


class Moving(Net):
    def transfer_batch_to_device(self, batch: Any, device: Any, index: int) -> Any:
        x, y = super().transfer_batch_to_device(batch, device, index)
        return x * 2, y


class BeforeMoving(Net):
    def on_before_batch_transfer(self, batch: Any, index: int) -> Any:
        return batch[0].flip(-1), batch[1]


class AfterMoving(Net):
    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        return batch[0] - batch[0].mean(), batch[1]  # over the batch


class Starting(Net):
    def on_train_batch_start(self, batch: Any, index: int) -> Any:
        return -1 if index == 1 else None


class Scheduling(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        scheduler.step()


class SkipsOdd(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else self.lose(*batch)[0]


class SkipsEven(Net):
    """The first batch of all too, of which something is logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", 3.0)
        return self.lose(*batch)[0] if batch_idx % 2 else None


HOOKS = [
    Backward,
    Before,
    After,
    BeforeStep,
    Stepping,
    ByHand,
    Zeroing,
    BeforeZero,
    Clipping,
    Moving,
    BeforeMoving,
    AfterMoving,
    Starting,
    Scheduling,
    SkipsOdd,
    SkipsEven,
]


@pytest.mark.large(few=5)
@pytest.mark.parametrize("how", [{"micro_batch": 3}, {"memory": "60KiB"}], ids=str)
@pytest.mark.parametrize("variant", HOOKS, ids=lambda variant: variant.__name__)
def test_hooks_and_skipped_batches_are_lightnings_own(variant: Any, how: dict[str, Any]) -> None:
    one, other = made(variant), made(variant)
    theirs, ours = fit(one), fit(other, FullBatch(**how))
    assert len(ours.after) == len(theirs.after)
    for mine, want in zip(ours.after, theirs.after, strict=True):
        assert_exact(mine, want)
    assert_exact(other.state_dict(), one.state_dict())
    assert [set(logs) for logs in ours.logged] == [set(logs) for logs in theirs.logged]


class TooFew(Net):
    """Skips what is too small for it, which every micro-batch is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if len(batch[0]) < 8 else self.lose(*batch)[0]


class NotFinite(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.lose(*batch)[0]
        return loss if loss > 1e9 else None


class AfterForward(Net):
    """By what is no value of the batch, but BatchNorm has been moved."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.lose(*batch)
        return loss if batch_idx else None


@pytest.mark.parametrize("variant", [TooFew, NotFinite, AfterForward])
def test_none_for_some_rows_is_refused_where_the_batch_may_not_be_skipped(variant: Any) -> None:
    module = made(variant)
    with pytest.raises(LossError, match="must skip a batch before it reads rows"):
        fit(module, FullBatch(micro_batch=3))
    assert_exact(module.state_dict(), made(variant).state_dict())


class ByInputs(Net):
    """Gradients of some parameters alone."""

    def backward(self, loss: Tensor, *arguments: Any, **named: Any) -> None:
        loss.backward(inputs=[self.body[0].weight])


class Nothing(Net):
    def backward(self, loss: Tensor, *arguments: Any, **named: Any) -> None:
        pass


@pytest.mark.parametrize("variant", [ByInputs, Nothing])
def test_a_backward_that_does_not_reach_the_loss_is_refused(variant: Any) -> None:
    module = made(variant)
    with pytest.raises((NotExactError, RuntimeError), match="are not delivered|not have been used"):
        fit(module, FullBatch(micro_batch=3))
    assert all(map(torch.equal, module.parameters(), made().parameters()))


WRONG = [None, "bar", [1, 2], {"a": {"b": 1.0}}, torch.ones(3)]


@pytest.mark.parametrize("value", WRONG, ids=str)
def test_a_value_that_cannot_be_logged_is_named(value: Any) -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("foo", value)
            return self.lose(*batch)[0]

    with pytest.raises(ValueError, match="foo"):
        fit(made(Logs))
    with pytest.raises(ValueError, match=r"self.log\('foo', ...\) got"):
        fit(made(Logs), FullBatch(micro_batch=3))


def through_pickle(one: Any) -> Any:
    return pickle.loads(pickle.dumps(one))


@pytest.mark.large(few=1)
@pytest.mark.parametrize("again", [through_pickle, copy.deepcopy, copy.copy])
def test_a_callback_can_be_sent_to_another_process_before_and_after_a_fit(again: Any) -> None:
    full = again(FullBatch(micro_batch=3, rng="batch"))
    assert_full_batch(fit(made(), full))
    other = again(full)
    assert other.engine is None
    assert other.state_dict() == full.state_dict() != {}
    assert_full_batch(fit(made(), other))
    assert other.engine.micro_batch == 3


EMPTIES = {
    "the module": lambda module: module.zero_grad(),
    "a part": lambda module: module.body.zero_grad(),
    "its optimizer": lambda module: module.optimizers().zero_grad(),
    "the bare optimizer": lambda module: module.optimizers().optimizer.zero_grad(),
}


class Empties(Net):
    way = ""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        EMPTIES[self.way](self)
        return self.lose(*batch)[0]


@pytest.mark.parametrize("way", EMPTIES)
def test_a_step_that_empties_the_gradients_of_earlier_rows_is_refused(way: str) -> None:
    module = made(Empties)
    module.way = way
    with pytest.raises(NotExactError, match="training_step calls zero_grad"):
        fit(module, FullBatch(micro_batch=4))
    assert "zero_grad" not in vars(module)


LOGS: dict[str, Any] = {
    "a number": (lambda module, loss, out: module.log("lr", 0.1), True),
    "the loss": (lambda module, loss, out: module.log("loss", loss), True),
    "several": (
        lambda module, loss, out: module.log_dict({"a": loss.detach(), "b": out.mean()}),
        True,
    ),
    "rows": (lambda module, loss, out: module.log("n", float(len(out)), reduce_fx="sum"), True),
    "a mean of losses": (lambda module, loss, out: module.mean(loss), True),
    "a metric": (lambda module, loss, out: module.log("m", module.own(out, out + 1)), True),
    "a number that is read": (lambda module, loss, out: module.log("a", float(out.mean())), False),
    "an array": (lambda module, loss, out: module.log("a", max(out.tolist()[0])), False),
}
"""What a step logs, and whether that leaves the plan shown."""


class Logs(Net):
    way = ""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.own = MeanMetric(), MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, out = self.lose(*batch)
        LOGS[self.way][0](self, loss, out)
        return loss


class Weighs(Logs):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        return F.cross_entropy(out * self.mean(out.detach()), batch[1])


def test_the_value_of_a_metric_in_the_loss_is_that_of_some_rows_and_refused() -> None:
    with pytest.raises(NotExactError, match="samples must not meet inside the model"):
        fit(made(Weighs), FullBatch(micro_batch=4))


@pytest.mark.large(few=3)
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
@pytest.mark.parametrize("way", LOGS)
def test_what_log_itself_reads_is_no_read_of_the_samples(way: str) -> None:
    module, full = made(Logs), FullBatch(micro_batch=4)
    module.way = way
    assert_full_batch(fit(module, full))
    assert full.engine is not None
    assert full.engine.plan is not None
    assert bool(full.engine.plan.exact) is LOGS[way][1]


class Decays(Net):
    """A part of the loss that belongs to no sample, as the refusal says to write it."""

    marked = True

    def lose(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss, out = super().lose(x, y)
        square = self.body[0].weight.square().sum()
        more = coupled(lambda value: 0.1 * value)(square) if self.marked else 0.1 * square
        return loss + more, out


@pytest.mark.large(few=1)
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_the_square_of_a_weight_is_a_part_of_the_loss(micro_batch: int) -> None:
    assert_full_batch(fit(made(Decays), FullBatch(micro_batch=micro_batch)))
    bare = made(Decays)
    bare.marked = False
    with pytest.raises(LossError, match=r"coupled\(lambda value: 0.1 \* value\)"):
        fit(bare, FullBatch(micro_batch=micro_batch))


class Centres(Net):
    """Centres its outputs by the rows of a batch from the second epoch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        out = out - out.mean(0) if self.current_epoch > 0 else out
        return F.cross_entropy(out, y)


class CentresTargets(Centres):
    """The same of what it is compared with, which leaves no trace in the graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        wanted = F.one_hot(y, 5).to(x.dtype)
        return F.mse_loss(self(x), wanted - (wanted.mean(0) if self.current_epoch > 0 else 0))


@pytest.mark.parametrize("variant", [Centres, CentresTargets])
def test_what_changes_with_the_epoch_is_looked_at(variant: Any) -> None:
    module = made(variant)
    with pytest.raises(NotExactError, match="samples must not meet"):
        fit(module, FullBatch(micro_batch=3), max_epochs=2)
    assert module.current_epoch == 1
