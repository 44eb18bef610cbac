"""The bytes of both algorithms beside those of real arrays."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from benchmarks.simulators.fft_memory import fft_bytes, gemm_bytes, ratio
from benchmarks.simulators.layers import Convolution, Shape


@pytest.mark.parametrize("seed", range(20))
def test_bytes_are_those_of_the_arrays(seed: int) -> None:
    rng = random.Random(seed)
    side, c, k, n = rng.randint(5, 20), rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 4)
    f = rng.randint(1, 5)
    layer, shape = Convolution(k, f, rng.randint(1, 2), rng.randint(0, 2)), Shape(side, side, c)
    x, w = torch.empty(n, c, side, side), torch.empty(k, c, f, f)
    y = torch.conv2d(x, w, stride=layer.stride, padding=layer.padding)
    assert gemm_bytes(layer, shape, n) == x.nbytes + y.nbytes
    spectra = [
        torch.fft.rfft2(torch.empty(*leading, side, side)).to(torch.complex64).nbytes
        for leading in ((n, c), (n, k), (k, c))
    ]
    assert fft_bytes(layer, shape, n) == sum(spectra)
    assert ratio(layer, shape, n) == pytest.approx(np.sum(spectra) / (x.nbytes + y.nbytes))
