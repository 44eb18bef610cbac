"""Equations 1 to 5 beside torch's own layers, which know their shapes and parameters."""

from __future__ import annotations

import random

import pytest
import torch
from benchmarks.simulators.layers import Convolution, Dense, Network, Pooling, Shape
from torch import nn


def drawn(rng: random.Random) -> tuple[Network, nn.Sequential]:
    """A network as data, and as torch has it."""
    shape = Shape(rng.randint(12, 40), rng.randint(12, 40), rng.randint(1, 5))
    layers: list[Convolution | Pooling] = []
    modules: list[nn.Module] = []
    depth = shape.depth
    for _ in range(rng.randint(1, 3)):
        f, s = rng.randint(1, 4), rng.randint(1, 2)
        if rng.random() < 0.6:
            k, p = rng.randint(1, 6), rng.randint(0, 2)
            layers.append(Convolution(k, f, s, p))
            modules.append(nn.Conv2d(depth, k, f, s, p))
            depth = k
        else:
            p = rng.randint(0, f // 2)
            layers.append(Pooling(f, s, p))
            modules.append(nn.MaxPool2d(f, s, p))
    network = Network(shape, tuple(layers))
    width, dense = network.shapes()[-1].values, []
    modules.append(nn.Flatten())
    for _ in range(rng.randint(0, 2)):
        out = rng.randint(1, 9)
        dense.append(Dense(out))
        modules.append(nn.Linear(width, out))
        width = out
    return Network(shape, tuple(layers), tuple(dense)), nn.Sequential(*modules).to("meta")


@pytest.mark.parametrize("seed", range(60))
def test_shapes_parameters_and_bytes_are_those_of_torch(seed: int) -> None:
    rng = random.Random(seed)
    network, model = drawn(rng)
    n = rng.randint(1, 9)
    x = torch.empty(n, network.inputs.depth, network.inputs.height, network.inputs.width)
    x = x.to("meta")
    features, outputs, shapes = [x.nbytes], 0, []
    for module in model:
        x = module(x)
        if isinstance(module, nn.Linear):
            outputs += x.nbytes
        elif not isinstance(module, nn.Flatten):
            features.append(x.nbytes)
            shapes.append(Shape(x.shape[2], x.shape[3], x.shape[1]))
    assert network.shapes()[1:] == shapes
    assert network.parameters == sum(p.numel() for p in model.parameters())
    found = network.memory(n)
    assert found.features == sum(features)
    linear = [m for m in model if isinstance(m, nn.Linear)]
    dense = sum(p.nbytes for m in linear for p in m.parameters())
    assert found.classifier == outputs + 3 * dense
    assert found.parameters == 3 * sum(p.nbytes for p in model.parameters()) - 3 * dense
    assert network.bound(10**9, n) == 10**9 - found.total


@pytest.mark.parametrize("seed", range(20))
def test_word_for_word_the_classifier_counts_one_sample_and_one_bias_a_layer(seed: int) -> None:
    network, model = drawn(random.Random(seed))
    linear = [m for m in model if isinstance(m, nn.Linear)]
    widths = [m.in_features for m in linear[:1]] + [m.out_features for m in linear]  # L_1 ... L_m
    values = sum(widths) + sum(3 * m.weight.numel() for m in linear) + 3 * len(linear)
    printed = network.memory(7, printed=True)
    assert printed.classifier == 4 * values
    assert printed.features == network.memory(7).features
    assert printed.parameters == network.memory(7).parameters


def test_a_window_that_does_not_fit_is_refused() -> None:
    network = Network(Shape(4, 4, 1), (Pooling(3, 2), Convolution(2, 3)))
    with pytest.raises(ValueError, match="a window must fit in its padded input, and Convolution"):
        network.shapes()
    with pytest.raises(ValueError, match="samples must be an integer of at least 1"):
        network.memory(0)
    with pytest.raises(ValueError, match="depth must be an integer of at least 1"):
        Shape(3, 3, 0)
