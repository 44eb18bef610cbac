from __future__ import annotations

import pytest
import torch

import anybatch
from anybatch.cli.faults import SettingsError
from anybatch.cli.metrics import Accuracy, IoU, bce_dice, bce_dice_per_image, make_loss, make_metric


def batch(n: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(n, 1, 4, 3, dtype=torch.float64)
    return logits, (torch.rand(n, 1, 4, 3) > 0.6).double()


def dice_coefficient_by_hand(p: list[float], y: list[float]) -> float:
    both = sum(a * b for a, b in zip(p, y, strict=True))
    return (2 * both + 1) / (sum(p) + sum(y) + 1)


def test_bce_dice_coefficient_is_equations_18_to_20_over_the_full_batch() -> None:
    logits, masks = batch()
    p, y = torch.sigmoid(logits).flatten(), masks.flatten()
    bce = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
    expected = bce + 1 - dice_coefficient_by_hand(p.tolist(), y.tolist())
    torch.testing.assert_close(bce_dice(logits, masks), expected, rtol=1e-12, atol=0)


def test_bce_dice_per_image_is_the_loss_of_each_image_by_itself() -> None:
    logits, masks = batch()
    each = torch.stack([bce_dice(logits[i : i + 1], masks[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(bce_dice_per_image(logits, masks), each, rtol=1e-12, atol=0)


def test_a_perfect_empty_mask_costs_next_to_nothing() -> None:
    empty = torch.zeros(2, 1, 4, 4)
    assert bce_dice(torch.full_like(empty, -40), empty) < 1e-6
    assert bce_dice_per_image(torch.full_like(empty, -40), empty).max() < 1e-6


@pytest.mark.parametrize("name", ["bce", "bce+dice", "bce+dice-per-image"])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 7])
def test_every_loss_streams_exactly(name: str, micro_batch: int) -> None:
    model = torch.nn.Conv2d(1, 1, 3, padding=1).double()
    logits, masks = batch()
    loss = make_loss(name, "segmentation")
    report = anybatch.check(model, loss, (logits, masks), micro_batch=micro_batch)
    assert report.exact, str(report)


def test_a_loss_of_the_other_task_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"for classification must be one of cross-entropy"):
        make_loss("bce", "classification")
    with pytest.raises(SettingsError, match=r"for segmentation must be one of bce, bce\+dice, "):
        make_loss("cross-entropy", "segmentation")


def test_accuracy_counts_over_uneven_batches() -> None:
    logits, classes = torch.randn(11, 4), torch.randint(4, (11,))
    metric = make_metric("classification")
    for rows in (slice(0, 7), slice(7, 10), slice(10, 11)):
        metric.update(logits[rows], classes[rows])
    by_hand = sum(int(row.argmax()) == int(c) for row, c in zip(logits, classes, strict=True))
    assert metric.value() == by_hand / 11
    assert Accuracy().value() == 0.0


def test_iou_counts_pixels_over_uneven_batches() -> None:
    logits, masks = batch(7)
    metric = make_metric("segmentation")
    for rows in (slice(0, 4), slice(4, 6), slice(6, 7)):
        metric.update(logits[rows], masks[rows])
    pairs = [(a > 0, b == 1) for a, b in zip(logits.flatten(), masks.flatten(), strict=True)]
    both = sum(bool(a and b) for a, b in pairs)
    either = sum(bool(a or b) for a, b in pairs)
    assert metric.value() == both / either
    assert IoU().value() == 1.0
