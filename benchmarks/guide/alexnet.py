"""AlexNet as the guide's Table 2 has it: 224x224 pixels, convolutions that are not grouped."""

from benchmarks.simulators.layers import Convolution, Dense, Network, Pooling, Shape

ALEXNET = Network(
    Shape(224, 224, 3),
    (
        Convolution(96, 11, stride=4, padding=2),
        Pooling(3, 2),
        Convolution(256, 5, padding=2),
        Pooling(3, 2),
        Convolution(384, 3, padding=1),
        Convolution(384, 3, padding=1),
        Convolution(256, 3, padding=1),
        Pooling(3, 2),
    ),
    (Dense(4096), Dense(4096), Dense(1000)),
)
SAMPLES = 128

TABLE_2 = (11.6, 1.6, 2.3, 2.7, 2.3)
"""FFT over GEMM, bytes, of its five convolutions, as printed."""


def convolutions() -> list[tuple[Convolution, Shape]]:
    """Each convolution with the shape of its input."""
    pairs = zip(ALEXNET.extraction, ALEXNET.shapes(), strict=False)
    return [(layer, shape) for layer, shape in pairs if isinstance(layer, Convolution)]
