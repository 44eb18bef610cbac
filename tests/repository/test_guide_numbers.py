"""The guide's own numbers: what it says beside what the lemmas and equations give."""

from __future__ import annotations

import pytest
from benchmarks.guide.alexnet import ALEXNET, SAMPLES, TABLE_2, convolutions
from benchmarks.simulators.fft_memory import ratio
from benchmarks.simulators.layers import Shape
from benchmarks.simulators.lemma import gpus_for, overhead_limit
from benchmarks.simulators.parameter_servers import Cluster, servers_for

from anybatch.tools.gpus import efficiency, speedup

GIGABIT = 1e9 / 8
"""Bytes a second of a link of 1 Gbit/s."""


def test_four_gpus_at_80_percent_allow_9_percent_of_overhead() -> None:
    """'Given four GPUs and target efficiency 80 %, the ratio must not exceed 9 %.'"""
    assert efficiency(0.09, 4) >= 0.80
    assert efficiency(0.10, 4) < 0.80
    assert round(100 * overhead_limit(0.80, 4)) == 9


def test_three_times_as_fast_with_10_percent_of_overhead_takes_four_gpus() -> None:
    """'Make 3x speedup ... measures R_O = 10 % ... she can configure a 4 GPU system.'"""
    assert gpus_for(3, 0.10).gpus == 4
    assert speedup(0.10, 3) < 3 <= speedup(0.10, 4)


def test_half_of_the_work_left_over_caps_the_speedup_at_two() -> None:
    """'If the non-parallelizable portion is 50 %, ... only a speedup factor of two.'"""
    assert gpus_for(2, 1.0).limit == 2
    assert speedup(1.0, 10**9) == pytest.approx(2)


def test_the_traffic_of_alexnet_exceeds_a_gigabit() -> None:
    """'Around 180 MB network traffic, which exceeds the capacity of 1 Gbit Ethernet.'"""
    printed, ours = 180 * 10**6, 4 * ALEXNET.parameters
    for size in (printed, ours):
        assert size / GIGABIT > 1  # more than a second each way
        one = Cluster(1, compute=1.0, parameters=size, server=GIGABIT, worker=GIGABIT)
        assert one.servers_for().count is None  # its own link is too slow for rounds of a second
    assert servers_for(1, 1.0, printed, GIGABIT) == 3
    ten = Cluster(1, compute=1.0, parameters=printed, server=10 * GIGABIT, worker=10 * GIGABIT)
    assert ten.servers_for().count == 1


def test_the_shapes_of_alexnet_are_those_of_table_2() -> None:
    convolved = [(shape, layer.after(shape)) for layer, shape in convolutions()]
    sides = [(before.height, after.height) for before, after in convolved]
    assert sides == [(224, 55), (27, 27), (13, 13), (13, 13), (13, 13)]
    depths = [(before.depth, after.depth) for before, after in convolved]
    assert depths == [(3, 96), (96, 256), (256, 384), (384, 384), (384, 256)]
    assert ALEXNET.shapes()[-1] == Shape(6, 6, 256)


def test_the_memory_of_alexnet_at_128_is_that_of_the_equations() -> None:
    """Written out once more, in bits as they are printed; Equation 4 with L = 9216 ... 1000."""
    maps = [224**2 * 3, 55**2 * 96, 27**2 * 96, 27**2 * 256, 13**2 * 256]
    maps += [13**2 * 384, 13**2 * 384, 13**2 * 256, 6**2 * 256]
    features = sum(maps) * 128 * 32
    filters = [(11, 3, 96), (5, 96, 256), (3, 256, 384), (3, 384, 384), (3, 384, 256)]
    parameters = sum((f * f * d * k + k) * 3 * 32 for f, d, k in filters)
    widths = [9216, 4096, 4096, 1000]
    weights = 9216 * 4096 + 4096 * 4096 + 4096 * 1000
    classifier = sum(widths) * 32 + weights * 3 * 32 + 3 * 3 * 32
    found = ALEXNET.memory(SAMPLES, printed=True)
    assert 8 * found.features == features
    assert 8 * found.parameters == parameters
    assert 8 * found.classifier == classifier
    device = 12 << 30  # one of its GPUs
    assert ALEXNET.bound(device, SAMPLES, printed=True) == device - found.total > 0


def test_the_ratios_of_table_2_are_those_of_half_spectra() -> None:
    """FFT: spectra of inputs, outputs and filters, as large as the input; GEMM: inputs, outputs."""
    for (layer, shape), printed in zip(convolutions(), TABLE_2, strict=True):
        assert ratio(layer, shape, SAMPLES) == pytest.approx(printed, rel=0.05)
