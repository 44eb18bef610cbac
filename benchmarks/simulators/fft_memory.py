"""How much more memory a convolution by FFT takes than one by matrix products.

By FFT, inputs, outputs and filters are spectra as large as the input; filters are padded to it. The
spectrum of n x n real values has n (n / 2 + 1) complex ones, the rest mirrors them. By matrix
products (GEMM) there are the inputs and the outputs themselves:

    FFT / GEMM = 2 n (n/2 + 1) (X C + X K + C K) / (X n^2 C + X m^2 K)

with X samples of C channels and n x n pixels, K filters, outputs of m x m. The guide prints five
such ratios and no formula. This one gives all five within 5 %. A few others do too, so the table
does not tell which one its authors used (`benchmarks/guide/numbers` has some).

Source: guide, Table 2; the formula is this project's.
"""

from __future__ import annotations

from benchmarks.simulators.layers import VALUE, Convolution, Shape


def gemm_bytes(layer: Convolution, shape: Shape, samples: int) -> int:
    """Return the bytes of inputs and outputs.

    Args:
        layer: the convolution.
        shape: of its input.
        samples: X_mini.
    """
    return VALUE * samples * (shape.values + layer.after(shape).values)


def fft_bytes(layer: Convolution, shape: Shape, samples: int) -> int:
    """Return the bytes of the spectra of inputs, outputs and filters, all as large as the input.

    Args:
        layer: the convolution.
        shape: of its input.
        samples: X_mini.
    """
    plane = 2 * shape.height * (shape.width // 2 + 1)
    planes = samples * (shape.depth + layer.filters) + shape.depth * layer.filters
    return VALUE * plane * planes


def ratio(layer: Convolution, shape: Shape, samples: int) -> float:
    """Return how many times GEMM's bytes the FFT's are."""
    return fft_bytes(layer, shape, samples) / gemm_bytes(layer, shape, samples)
