"""Formulas for Table 2: what an FFT may be thought to hold, over what GEMM may be thought to.

The guide prints ratios only. Here are spectra of each size that an implementation has, with and
without what else is kept, in bytes of single precision over all five convolutions.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

from benchmarks.guide.alexnet import SAMPLES, TABLE_2, convolutions
from benchmarks.simulators.layers import Convolution, Shape

Side = Callable[[Convolution, int], int]
SIDES: dict[str, Side] = {
    "input": lambda _, n: n,
    "padded input": lambda layer, n: n + 2 * layer.padding,
    "input + filter - 1": lambda layer, n: n + layer.size - 1,
    "power of two": lambda _, n: _power(n),
    "power of two of input + filter - 1": lambda layer, n: _power(n + layer.size - 1),
}
WORDS: dict[str, Callable[[int], int]] = {
    "half spectra": lambda n: 2 * n * (n // 2 + 1),
    "real planes": lambda n: n * n,
    "full spectra": lambda n: 2 * n * n,
}
GEMM = {
    "inputs, outputs": (1, 0, 0),
    "inputs, outputs, filters": (1, 1, 0),
    "inputs, outputs, patches of a sample": (1, 0, 1),
    "inputs, outputs, filters, patches of a sample": (1, 1, 1),
    "inputs, outputs, filters, patches of all": (1, 1, SAMPLES),
}
"""What GEMM holds -> how often operands, filters and the patches of one sample are counted."""
OURS = ("input", "half spectra", "inputs, outputs")


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def ratios(side: str, words: str, gemm: str) -> list[float]:
    """FFT over GEMM of the five convolutions."""
    return [_ratio(layer, shape, side, words, gemm) for layer, shape in convolutions()]


def _ratio(layer: Convolution, shape: Shape, side: str, words: str, gemm: str) -> float:
    after = layer.after(shape)
    c, k = shape.depth, layer.filters
    plane = WORDS[words](SIDES[side](layer, shape.height))
    fft = plane * (SAMPLES * (c + k) + c * k)
    operands, filters, patches = GEMM[gemm]
    plain = operands * SAMPLES * (shape.values + after.values)
    plain += filters * layer.size**2 * c * k
    plain += patches * layer.size**2 * c * after.height * after.width
    return fft / plain


def formulas() -> list[dict[str, Any]]:
    """Every combination with its ratios and its largest error, the nearest first."""
    found: list[dict[str, Any]] = []
    for names in product(SIDES, WORDS, GEMM):
        values = ratios(*names)
        errors = [ours / printed - 1 for ours, printed in zip(values, TABLE_2, strict=True)]
        worst = max(map(abs, errors))
        found.append({"names": list(names), "ratios": values, "errors": errors, "worst": worst})
    return sorted(found, key=lambda one: (one["worst"], one["names"]))
