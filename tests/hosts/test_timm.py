"""timm's training loop beside an engine: its losses, mixup, optimizers, schedules, averages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracle import assert_exact, error_of, state_of, undivided
from torch import Tensor, nn

import anybatch
from anybatch.errors import NotExactError

timm = pytest.importorskip("timm", reason="needs timm: make hosts")
pytestmark = pytest.mark.filterwarnings("ignore")

from timm import data, layers, loss, optim, scheduler, utils  # noqa: E402

N, CLASSES, STEPS = 10, 6, 3
Step = Callable[..., Tensor]


def network(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
    return model.double().train()


def batch(rows: int = N) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 3, 32, 32, dtype=torch.float64, generator=draw)
    return images, torch.randint(CLASSES, (rows,), generator=draw)


def whole(model: nn.Module, loss_fn: nn.Module, optimizer: Any) -> Step:
    """The step of timm's script, on a batch that fits."""
    scaler = utils.NativeScaler(device="cpu")
    scaler._scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(images: Tensor, targets: Tensor, clip: str) -> Tensor:
        value = loss_fn(model(images), targets)
        scaler(value, optimizer, clip_grad=0.1, clip_mode=clip, parameters=model.parameters())
        detached: Tensor = value.detach()
        return detached

    return step


def rescaled(model: nn.Module, loss_fn: nn.Module, optimizer: Any) -> Step:
    """The same, of three times the loss and a third of its gradient: it differs by rounding."""

    def step(images: Tensor, targets: Tensor, clip: str) -> Tensor:
        value = loss_fn(model(images), targets)
        (3 * value).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= 3
        utils.dispatch_clip_grad(model.parameters(), 0.1, mode=clip)
        optimizer.step()
        detached: Tensor = value.detach()
        return detached

    return step


def divided(model: nn.Module, loss_fn: nn.Module, optimizer: Any) -> Step:
    """The same with an engine: `NativeScaler` calls backward, so its parts are called."""
    engine = anybatch.Engine(model, loss_fn, optimizer=optimizer, micro_batch=3, rng="batch")
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(images: Tensor, targets: Tensor, clip: str) -> Tensor:
        value = engine.backward(images, targets, scaler=scaler)
        scaler.unscale_(optimizer)
        utils.dispatch_clip_grad(model.parameters(), 0.1, mode=clip)
        scaler.step(optimizer)
        scaler.update()
        assert engine.plan is not None
        assert engine.plan.exact
        return value

    return step


def trained(
    model: nn.Module, make: Callable[..., Step], opt: str, mixup: dict[str, Any], clip: str
) -> list[dict[str, Tensor]]:
    """What is there after each step of `train_one_epoch`, with timm's pieces."""
    model = copy.deepcopy(model)
    optimizer = optim.create_optimizer_v2(model, opt=opt, lr=0.05, weight_decay=0.02)
    schedule, _ = scheduler.create_scheduler_v2(optimizer, sched="cosine", num_epochs=STEPS)
    average = utils.ModelEmaV3(model, decay=0.9, use_warmup=True)
    loss_fn = loss.SoftTargetCrossEntropy() if mixup else loss.LabelSmoothingCrossEntropy(0.1)
    mix = data.Mixup(num_classes=CLASSES, label_smoothing=0.1, **mixup) if mixup else None
    step, found = make(model, loss_fn, optimizer), []
    torch.manual_seed(3)
    np.random.seed(3)
    for update in range(STEPS):
        images, targets = batch(N - 2 * update)  # any size: mixup wants an even one
        if mix is not None:
            images, targets = mix(images, targets)
        optimizer.zero_grad()
        value = step(images, targets, clip)
        average.update(model, step=update)
        schedule.step(update + 1)
        found.append(state_of(model, value))
        every = {"model": model, "average": average.module}
        found[-1] |= {
            f"{name} {key}": value.detach().clone()
            for name, one in every.items()
            for key, value in one.state_dict().items()
        }
    return found


@pytest.mark.parametrize(
    ("name", "options", "opt", "mixup", "clip"),
    [
        ("test_resnet", {"drop_path_rate": 0.2}, "sgd", {"mixup_alpha": 0.8}, "norm"),
        ("test_vit", {"img_size": 32, "drop_path_rate": 0.2}, "adamw", {}, "norm"),
        ("test_convnext", {"drop_path_rate": 0.2}, "lamb", {"cutmix_alpha": 1.0}, "value"),
        ("test_efficientnet", {}, "rmsproptf", {"mixup_alpha": 1.0, "mode": "elem"}, "agc"),
    ],
)
def test_three_steps_of_the_training_loop(
    name: str, options: dict[str, Any], opt: str, mixup: dict[str, Any], clip: str
) -> None:
    model = network(name, **options)
    runs = (trained(model, make, opt, mixup, clip) for make in (divided, whole, rescaled))
    for got, want, other in zip(*runs, strict=True):
        assert_exact(got, want, error_of(other, want))


HEAD = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()
ROWS = 12
HARD = torch.arange(ROWS) % CLASSES
SOFT = torch.softmax(torch.sin(torch.arange(ROWS * CLASSES).double()).view(ROWS, CLASSES), 1)
LOSSES = {
    "LabelSmoothing": (loss.LabelSmoothingCrossEntropy(0.1), HARD, "streaming"),
    "SoftTarget": (loss.SoftTargetCrossEntropy(), SOFT, "streaming"),
    "BCE, soft": (loss.BinaryCrossEntropy(0.1, target_threshold=0.2), SOFT, "streaming"),
    "BCE, hard": (loss.BinaryCrossEntropy(0.1), HARD, "two-pass"),
    "BCE, sum of classes": (loss.BinaryCrossEntropy(sum_classes=True), SOFT, "streaming"),
    "JSD of 3 views": (loss.JsdCrossEntropy(3), HARD, "two-pass"),
    "JSD of 2 views": (loss.JsdCrossEntropy(2, smoothing=0), HARD, "two-pass"),
    "asymmetric, many": (loss.AsymmetricLossMultiLabel(), SOFT.round(), "two-pass"),
    "asymmetric, one": (loss.AsymmetricLossSingleLabel(), HARD, "two-pass"),
}


@pytest.mark.parametrize("size", [1, 5, 8])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_exact(name: str, size: int) -> None:
    loss_fn, targets, mechanism = LOSSES[name]
    images = torch.randn(ROWS, 3, 4, 4, dtype=torch.float64)
    want = undivided(HEAD, loss_fn, images, targets)
    model = copy.deepcopy(HEAD)
    engine = anybatch.Engine(model, loss_fn, micro_batch=size)
    assert_exact(state_of(model, engine.backward(images, targets)), want)
    assert engine.plan is not None
    assert engine.plan.mechanism == mechanism
    assert engine.plan.exact


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_split_batchnorm_is_refused_by_its_name(size: int) -> None:
    """It takes an even number of rows, and normalises each half of the batch by itself."""
    model = layers.convert_splitbn_model(network("test_resnet"), 2).double()
    engine = anybatch.Engine(model, nn.CrossEntropyLoss(), micro_batch=size)
    with pytest.raises(NotExactError, match=r"\(SplitBatchNorm2d\) normalises a part"):
        engine.backward(*batch(8))
