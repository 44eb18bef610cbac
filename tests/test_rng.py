from __future__ import annotations

import random

import numpy as np
import torch

from anybatch.rng import Dice


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_the_same_dice_give_the_same_draws_from_all_generators() -> None:
    dice = Dice.now()
    first = draw()
    second = draw()
    assert all(a != b for a, b in zip(first, second, strict=True))
    dice.put_back()
    assert draw() == first
    dice.put_back()
    assert draw() == first, "a state can be put back any number of times"


def test_taking_the_state_draws_nothing() -> None:
    torch.manual_seed(3)
    Dice.now()
    a = torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(a, torch.rand(()))
