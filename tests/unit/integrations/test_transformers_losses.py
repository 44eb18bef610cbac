"""The losses of a Trainer that are taken outside of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anybatch.integrations.transformers_losses import Count, Items, UserLoss


def test_items_are_a_number_that_answers_as_a_tensor() -> None:
    items = Items(torch.tensor(7))
    assert items.to("cpu", non_blocking=True) is items
    assert (items.item(), 14.0 / items) == (7, 2.0)


def test_a_passed_loss_receives_the_items_of_its_step() -> None:
    traced: list[Any] = []

    def loss(outputs: Tensor, labels: Tensor | None, num_items_in_batch: Any) -> Tensor:
        traced.append(num_items_in_batch)
        return outputs.sum()

    inputs = UserLoss(loss)
    inputs(torch.ones(2))
    inputs.items = Items(5)
    inputs(torch.ones(2), torch.ones(2))
    assert traced == [None, 5]


def test_labels_that_count_are_counted_after_the_shift() -> None:
    smoother = type("Smoother", (), {"ignore_index": -100})()
    labels = torch.tensor([[1, -100, 3], [4, 5, -100]])
    assert int(Count(smoother, shifts=False)(labels)) == 4
    assert int(Count(smoother, shifts=True)(labels)) == 2
