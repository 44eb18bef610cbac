"""The losses of a Trainer that are taken outside of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anybatch.integrations.transformers_losses import Count, GivenLoss, Items


def test_items_are_a_number_that_answers_as_a_tensor() -> None:
    items = Items(torch.tensor(7))
    assert items.to("cpu", non_blocking=True) is items
    assert (items.item(), 14.0 / items) == (7, 2.0)


def test_a_given_loss_hears_the_items_of_its_step() -> None:
    heard: list[Any] = []

    def loss(outputs: Tensor, labels: Tensor | None, num_items_in_batch: Any) -> Tensor:
        heard.append(num_items_in_batch)
        return outputs.sum()

    given = GivenLoss(loss)
    given(torch.ones(2))
    given.items = Items(5)
    given(torch.ones(2), torch.ones(2))
    assert heard == [None, 5]


def test_labels_that_count_are_counted_after_the_shift() -> None:
    smoother = type("Smoother", (), {"ignore_index": -100})()
    labels = torch.tensor([[1, -100, 3], [4, 5, -100]])
    assert int(Count(smoother, shifts=False)(labels)) == 4
    assert int(Count(smoother, shifts=True)(labels)) == 2
