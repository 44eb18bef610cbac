"""Changes of layers beside making each of them and solving the program again."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isinf

import pytest
from benchmarks.guide.alexnet import ALEXNET
from benchmarks.simulators.layer_to_change import adjustments
from benchmarks.simulators.layers import Convolution
from benchmarks.simulators.tests.test_minibatch import every

from anybatch.core.plan_sections import KernelPart

SAMPLES = 128
MB = 10**6
MEASURED = {
    "conv1": [KernelPart(SAMPLES, "gemm", 0.10, 0), KernelPart(SAMPLES, "fft", 0.09, 1500 * MB)],
    "conv2": [KernelPart(SAMPLES, "gemm", 0.40, 0), KernelPart(SAMPLES, "fft", 0.04, 250 * MB)],
    "conv3": [
        KernelPart(SAMPLES, "gemm", 0.20, 10 * MB),
        KernelPart(SAMPLES, "fft", 0.10, 150 * MB),
    ],
}


@pytest.mark.parametrize("headroom", [5, 20, 100, 240, 300, 500])
@pytest.mark.parametrize("adds", [True, False])
def test_every_change_is_worth_what_its_bytes_buy(headroom: int, adds: bool) -> None:
    device = ALEXNET.memory(SAMPLES).total + headroom * MB
    found = adjustments(ALEXNET, MEASURED, SAMPLES, device, adds=adds)
    before = every(MEASURED, SAMPLES, headroom * MB, adds=adds)
    assert {one.place for one in found} == set(range(len(ALEXNET.extraction)))
    for one in found:
        layer = ALEXNET.extraction[one.place]
        if one.what.startswith("stride"):
            changed = replace(layer, stride=2 * layer.stride)
        else:
            assert isinstance(layer, Convolution)
            changed = replace(layer, size=layer.size - 2, padding=layer.padding - 1)
            assert changed.after(ALEXNET.shapes()[one.place]) == layer.after(
                ALEXNET.shapes()[one.place]
            )
        layers = list(ALEXNET.extraction)
        layers[one.place] = changed
        other = replace(ALEXNET, extraction=tuple(layers))
        assert one.frees == device - headroom * MB - other.memory(SAMPLES).total
        assert one.before == pytest.approx(before)
        after = every(MEASURED, SAMPLES, headroom * MB + one.frees, adds=adds)
        assert one.after == pytest.approx(after)
    gains = [one.gains for one in found]
    assert gains == sorted(gains, reverse=True)
    assert all(gain >= 0 for gain in gains)


def test_the_layer_that_matters_is_not_the_one_that_frees_most_of_its_own() -> None:
    """Where nothing fits before, any change that lets it fit gains most."""
    device = ALEXNET.memory(SAMPLES).total + 5 * MB
    best = adjustments(ALEXNET, MEASURED, SAMPLES, device)[0]
    assert isinf(best.before)
    assert best.gains == inf
    assert best.frees >= 5 * MB
    plenty = adjustments(ALEXNET, MEASURED, SAMPLES, device + 10**10)
    assert {one.gains for one in plenty} == {0.0}
