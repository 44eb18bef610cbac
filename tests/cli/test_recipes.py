from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from anybatch.cli.build import make_optimizer, make_schedule
from anybatch.cli.faults import SettingsError
from anybatch.cli.settings import (
    RECIPES,
    Settings,
    choose,
    chosen_image_size,
    lr_factor,
    parse_image_size,
)


def test_the_mbs_recipes_are_those_of_section_4_2() -> None:
    numbers = {
        name: (r.optimizer, r.lr, r.momentum, r.weight_decay, r.schedule, r.loss)
        for name, r in RECIPES.items()
    }
    assert numbers == {
        "mbs-resnet": ("sgd", 0.01, 0.9, 5e-4, "constant", "cross-entropy"),
        "mbs-amoebanet": ("sgd", 0.1, 0.9, 1e-4, "linear", "cross-entropy"),
        "mbs-unet": ("adam", 0.01, 0.9, 5e-4, "constant", "bce+dice"),
    }
    assert RECIPES["mbs-unet"].image_size == (640, 959)
    assert RECIPES["mbs-unet"].crop == 384


def test_an_explicit_option_wins_over_the_recipe() -> None:
    options = Settings(data="x", recipe="mbs-resnet", lr=0.3, epochs=2, model="resnet18")
    recipe = choose(options, "classification")
    assert (recipe.lr, recipe.epochs, recipe.model) == (0.3, 2, "resnet18")
    assert (recipe.momentum, recipe.weight_decay) == (0.9, 5e-4)
    zero = choose(dataclasses.replace(options, momentum=0.0, weight_decay=0.0), "classification")
    assert (zero.momentum, zero.weight_decay) == (0.0, 0.0)
    assert chosen_image_size(Settings(recipe="mbs-unet")) == (640, 959)
    assert chosen_image_size(Settings(recipe="mbs-unet", image_size=(9, 8))) == (9, 8)
    assert chosen_image_size(Settings()) is None


def test_the_learning_rate_goes_with_the_optimizer_that_was_named() -> None:
    assert choose(Settings(optimizer="sgd"), "classification").lr == 0.05
    assert (
        choose(Settings(optimizer="adamw"), "classification").lr
        == choose(Settings(), "classification").lr
    )


def test_faults_of_a_recipe_are_named() -> None:
    with pytest.raises(SettingsError, match=r"recipe mbs-unet is not for classification"):
        choose(Settings(recipe="mbs-unet"), "classification")
    with pytest.raises(SettingsError, match=r"momentum is for the optimizer sgd; got adam"):
        choose(Settings(optimizer="adam", momentum=0.5), "classification")


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_optimizer_has_the_recipe_s_numbers(optimizer: str) -> None:
    settings = Settings(optimizer=optimizer, lr=0.5, weight_decay=0.25)  # type: ignore[arg-type]
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    trained = nn.Parameter(torch.ones(1))
    made = make_optimizer(choose(settings, "classification"), [frozen, trained])
    assert type(made).__name__.lower() == optimizer
    assert made.param_groups[0]["params"] == [trained]
    assert (made.defaults["lr"], made.defaults["weight_decay"]) == (0.5, 0.25)


def test_schedules_are_their_formulas() -> None:
    assert [lr_factor("linear", 4, step) for step in range(5)] == [1, 0.75, 0.5, 0.25, 0]
    assert lr_factor("constant", 4, 3) == 1
    assert lr_factor("cosine", 4, 1) == 0.5 * (1 + math.cos(math.pi / 4))
    parameter = nn.Parameter(torch.ones(1))
    recipe = choose(Settings(lr=2.0, schedule="linear", optimizer="sgd"), "classification")
    optimizer = make_optimizer(recipe, [parameter])
    schedule = make_schedule(recipe, optimizer, steps=4)
    observed = []
    for _ in range(4):
        observed.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert observed == [2.0, 1.5, 1.0, 0.5]


def test_all_faults_of_settings_are_said_at_once() -> None:
    wrong = Settings(
        batch_size=0,
        micro_batch=-1,
        lr=-1.0,
        momentum=1.5,
        seed=-2,
        image_size=(0, 5),
        norm="layer",  # type: ignore[arg-type]
    )
    with pytest.raises(SettingsError) as caught:
        wrong.checked()
    for fault in (
        "norm must be one of group, batch; got 'layer'",
        "batch-size must be at least 1; got 0",
        "micro-batch must be at least 1; got -1",
        "image-size must be at least 1; got 0",
        "lr must not be negative; got -1.0",
        "seed must not be negative; got -2",
        "momentum must be below 1; got 1.5",
    ):
        assert fault in str(caught.value)
    with pytest.raises(SettingsError, match=r"lr must not be negative; got nan"):
        Settings(lr=math.nan).checked()
    assert Settings().checked() == Settings()


def test_an_image_size_is_a_number_or_width_by_height() -> None:
    assert parse_image_size("224") == (224, 224)
    assert parse_image_size("959x640") == (640, 959)
    for wrong in ("", "x", "12x", "1x2x3", "-4", "1.5"):
        with pytest.raises(SettingsError, match=r"image-size must be a number of pixels or"):
            parse_image_size(wrong)
