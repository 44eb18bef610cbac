"""What a convolutional network holds in memory, by the arithmetic of the guide.

Layers are data. A sample goes through convolutions and pooling as B x H x D values, is flattened,
and goes through dense layers:

    224x224x3 -conv-> 55x55x96 -pool-> 27x27x96 ... -pool-> 6x6x256 = 9216 -> 4096 -> 1000

    B' = (B - F + 2 P) / S + 1, rounded down                                           (Eq. 1)
    features    sum of B H D, times the mini-batch                                     (Eq. 2)
    parameters  3 (F F D K + K) for each convolution: with two gradients beside them   (Eq. 3)
    classifier  its outputs, and 3 (L L' + L') for each dense layer                    (Eq. 4)
    bound       what the device has, less all of these                                 (Eq. 5)

A value takes 4 bytes; the guide counts bits. Its Equation 4 counts the outputs of one sample and
one bias for each layer; `printed=True` does that too, and otherwise they are of all samples and
outputs.

A step really holds more: gradients of features, and what backward keeps of other layers, are not
counted. Budgets are planned by traces (`anybatch.memory.ledger`); this is for the guide's own
program.

Source: guide, section 3.1.3, Equations 1 to 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from anybatch.tools.gpus import positive_integer

VALUE = 4
"""Bytes of a value in single precision."""

COPIES = 3
"""A parameter, its gradient of a sample and its gradient of the mini-batch."""


@dataclass(frozen=True)
class Shape:
    """What goes from one layer to the next for each sample: height, width, depth."""

    height: int
    width: int
    depth: int

    def __post_init__(self) -> None:
        positive_integer(height=self.height, width=self.width, depth=self.depth)

    @property
    def values(self) -> int:
        """Their product."""
        return self.height * self.width * self.depth


@dataclass(frozen=True)
class Convolution:
    """K filters of F x F over all of the depth.

    Attributes:
        filters: K, the depth of the output.
        size: F.
        stride: S. Default 1.
        padding: P on each side. Default 0.
    """

    filters: int
    size: int
    stride: int = 1
    padding: int = 0

    def after(self, shape: Shape) -> Shape:
        """Return the shape of its output."""
        height, width = (_slid(self, n) for n in (shape.height, shape.width))
        return Shape(height, width, self.filters)

    def parameters(self, shape: Shape) -> int:
        """Return its weights and biases, for inputs of a shape."""
        return self.size**2 * shape.depth * self.filters + self.filters


@dataclass(frozen=True)
class Pooling:
    """A window of F x F over each channel.

    Attributes:
        size: F.
        stride: S.
        padding: P on each side. Default 0.
    """

    size: int
    stride: int
    padding: int = 0

    def after(self, shape: Shape) -> Shape:
        """Return the shape of its output."""
        height, width = (_slid(self, n) for n in (shape.height, shape.width))
        return Shape(height, width, shape.depth)

    def parameters(self, shape: Shape) -> int:
        """Return 0."""
        del shape
        return 0


@dataclass(frozen=True)
class Dense:
    """A fully-connected layer with so many outputs."""

    outputs: int


def _slid(layer: Convolution | Pooling, side: int) -> int:
    """Return the places of a window along a side: Equation 1."""
    span = side - layer.size + 2 * layer.padding
    if span < 0:
        raise ValueError(
            f"a window must fit in its padded input, and {layer} meets a side of {side}: give it "
            "more padding, or the layers before it smaller strides"
        )
    return span // layer.stride + 1


@dataclass(frozen=True)
class Network:
    """A convolutional network as the guide has it.

    Attributes:
        inputs: shape of a sample.
        extraction: convolutions and pooling, in order.
        classifier: dense layers, in order. Default none.
    """

    inputs: Shape
    extraction: tuple[Convolution | Pooling, ...]
    classifier: tuple[Dense, ...] = ()

    def shapes(self) -> list[Shape]:
        """Return the shape of the inputs, and of every output of convolutions and pooling.

        Raises:
            ValueError: a window does not fit in its input.
        """
        found = [self.inputs]
        for layer in self.extraction:
            found.append(layer.after(found[-1]))
        return found

    @property
    def parameters(self) -> int:
        """Weights and biases of all layers."""
        dense = sum((came + 1) * went for came, went in self._dense())
        return self._extraction_parameters() + dense

    def memory(self, samples: int, *, printed: bool = False) -> Memory:
        """Return the bytes of a mini-batch.

        Args:
            samples: X_mini.
            printed: word for word as Equation 4 is printed. Default False: outputs of dense layers
                are counted for all samples, and their biases for all outputs.

        Raises:
            ValueError: `samples` is below 1, or a window does not fit in its input.

        Source: guide, Equations 2 to 4.
        """
        positive_integer(samples=samples)
        features = sum(shape.values for shape in self.shapes()) * samples
        parameters = COPIES * self._extraction_parameters()
        dense = self._dense()
        weights = sum(came * went for came, went in dense)
        outputs = sum(went for _, went in dense)
        if printed:  # L_1 to L_m, of which the first is what comes from the convolutions
            flat = dense[0][0] if dense else 0
            classifier = flat + outputs + COPIES * (weights + len(dense))
        else:
            classifier = outputs * samples + COPIES * (weights + outputs)
        return Memory(features * VALUE, parameters * VALUE, classifier * VALUE)

    def bound(self, device: int, samples: int, *, printed: bool = False) -> int:
        """Return M_bound, the bytes of a device that are left for workspaces; may be below 0.

        Args:
            device: M_GPU, its bytes.
            samples: X_mini.
            printed: see `memory`.

        Source: guide, Equation 5.
        """
        return device - self.memory(samples, printed=printed).total

    def _extraction_parameters(self) -> int:
        pairs = zip(self.extraction, self.shapes(), strict=False)
        return sum(layer.parameters(shape) for layer, shape in pairs)

    def _dense(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each dense layer."""
        widths = [self.shapes()[-1].values, *(layer.outputs for layer in self.classifier)]
        return list(pairwise(widths))


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are for.

    Attributes:
        features: inputs, and outputs of convolutions and pooling (Equation 2).
        parameters: of convolutions, with their gradients (Equation 3).
        classifier: outputs and parameters of dense layers, with gradients (Equation 4).
    """

    features: int
    parameters: int
    classifier: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.features + self.parameters + self.classifier
