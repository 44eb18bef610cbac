"""The three ways to the gradient of a mini-batch, and whether two of them are the same training.

The question is the design's (7.10), and "the curves look alike" is no answer to it. In float64 the
first 20 steps leave every parameter and running statistic within 1e-9. In float32 rounding alone
carries trainings apart, so there the measure is how far apart two undivided trainings are that
differ only in the order of the rows of each mini-batch. Both are asked of the tensor that is
furthest away and of all tensors as one vector: the first is strict, and in float32 it hangs on a
single small tensor, so that one draw more or less may decide it; the second does not.
"""

from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch import Engine
from benchmarks.agbn.images import Images, mini_batches
from benchmarks.agbn.training import Backward, Observe, Recipe, initial, undivided_step
from benchmarks.mbs.real_limit.compare import DOUBLE

Arm = Literal["undivided", "exact", "local"]
ARMS: tuple[Arm, ...] = ("undivided", "exact", "local")
ORDERS = tuple(range(1, 9))  # seeds of other orders of the rows of a mini-batch
MEASURES = ("worst", "all")
Weights = dict[str, Tensor]


def backward_of(arm: Arm, model: nn.Module, micro_batch: int) -> Backward:
    """Return the step of an arm: torch alone, or the engine's with the BatchNorm of its name."""
    if arm == "undivided":
        return undivided_step(model)
    engine = Engine(model, F.cross_entropy, micro_batch=micro_batch, batchnorm=arm)

    def backward(inputs: Tensor, targets: Tensor, observe: Observe) -> Tensor:
        return engine.backward(inputs, targets, observe=observe)

    return backward


def first_steps(
    arm: Arm,
    recipe: Recipe,
    micro_batch: int,
    images: Images,
    steps: int,
    *,
    dtype: torch.dtype,
    order: int = 0,
) -> Weights:
    """Return parameters and running statistics after the first steps of seed 0.

    `order` above 0 is the seed of a shuffle of the rows inside each mini-batch.
    """
    model = initial(0).to(dtype)
    backward, optimizer = backward_of(arm, model, micro_batch), recipe.optimizer(model)
    shuffle, done = torch.Generator().manual_seed(order), 0
    for epoch in range(recipe.epochs):
        for inputs, targets in mini_batches(images, recipe.batch, 0, epoch):
            if done == steps:
                break
            rows = torch.randperm(len(targets), generator=shuffle)
            rows = rows if order else torch.arange(len(targets))
            optimizer.param_groups[0]["lr"] = recipe.rate(done)
            optimizer.zero_grad()
            backward(inputs[rows].to(dtype), targets[rows], lambda *_: None)
            optimizer.step()
            done += 1
    assert done == steps, "a recipe has the steps that are compared"
    found = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
    return {name: value.clone() for name, value in found.items()}


def difference(a: Weights, b: Weights) -> dict[str, float]:
    """Return ||a - b|| / ||b|| of the tensor where it is largest, and of all as one vector."""
    gaps = torch.stack([(a[name].double() - b[name].double()).norm() for name in b])
    sizes = torch.stack([b[name].double().norm() for name in b])
    return {"worst": float((gaps / sizes).max()), "all": float(gaps.norm() / sizes.norm())}


def agreement(recipe: Recipe, micro_batch: int, images: Images, steps: int) -> dict[str, Any]:
    """Return how far exact and local are from undivided, and may be, in float64 and in float32.

    And how far all of float32 are from undivided in float64, the undivided ones as least and most
    over their orders: the order of rows leaves the kernels of a layer what they are, micro-batches
    do not, so the same distance can be reached with no more error.
    """

    def after(arm: Arm, dtype: torch.dtype, order: int = 0) -> Weights:
        return first_steps(arm, recipe, micro_batch, images, steps, dtype=dtype, order=order)

    double, single = (
        {arm: after(arm, dtype) for arm in ARMS} for dtype in (torch.float64, torch.float32)
    )
    orders = [single["undivided"], *(after("undivided", torch.float32, o) for o in ORDERS)]
    pairs = [difference(*pair) for pair in combinations(orders, 2)]
    truth = double["undivided"]
    errors = [difference(one, truth) for one in orders]
    return {
        "steps": steps,
        "batch": recipe.batch,
        "orders": len(orders),
        "float64": _from(double) | {"allowed": dict.fromkeys(MEASURES, DOUBLE)},
        "float32": _from(single) | {"allowed": {m: max(p[m] for p in pairs) for m in MEASURES}},
        "to_float64": {
            "exact": difference(single["exact"], truth),
            "local": difference(single["local"], truth),
            "least": {m: min(one[m] for one in errors) for m in MEASURES},
            "most": {m: max(one[m] for one in errors) for m in MEASURES},
        },
    }


def _from(states: dict[Arm, Weights]) -> dict[str, Any]:
    return {arm: difference(states[arm], states["undivided"]) for arm in ARMS[1:]}
