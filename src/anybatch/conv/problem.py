"""Problem of a convolution kernel: all that determines its time and workspace, except samples.

    forward   y  = x * w          operands x [N, C, image], w [F, C / groups, window]
    data      dx = dy * w'        operands dy [N, F, outputs], w
    filter    dw = x * dy         operands dy, x

Source: u-cuDNN, section II: Forward, BackwardData, BackwardFilter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kernel = Literal["forward", "data", "filter"]
KERNELS: tuple[Kernel, ...] = ("forward", "data", "filter")

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """A convolution kernel of one layer.

    Attributes:
        kernel: "forward", "data" (the gradient of its input) or "filter" (that of its weight).
        channels: C, of the input.
        filters: F, channels of the output.
        image: sizes of the input in space; one, two or three of them.
        window: sizes of the filters in space.
        stride: in each of these directions, and so are `padding` (zeros at both ends) and
            `dilation`.
        groups: of channels, each with filters of its own.
        dtype: of all operands, such as "float32".
        device: type of device.
        layout: "contiguous" or "channels_last", of the tensors with samples.
    """

    kernel: Kernel
    channels: int
    filters: int
    image: Sizes
    window: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    groups: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    layout: str = "contiguous"

    @property
    def outputs(self) -> Sizes:
        """Sizes of the output in space."""
        rows = zip(self.image, self.padding, self.spans, self.stride, strict=True)
        return tuple((h + 2 * p - k) // s + 1 for h, p, k, s in rows)

    @property
    def spans(self) -> Sizes:
        """Sizes of the filters in space with the holes that dilation makes."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.window, self.dilation, strict=True))

    @property
    def weight(self) -> Sizes:
        """Return the shape of the filters."""
        return (self.filters, self.channels // self.groups, *self.window)

    def operands(self, size: int) -> tuple[Sizes, Sizes]:
        """Return the shapes of both operands for so many samples."""
        x, y = (size, self.channels, *self.image), (size, self.filters, *self.outputs)
        if self.kernel == "forward":
            return x, self.weight
        return (y, self.weight) if self.kernel == "data" else (y, x)

    def result(self, size: int) -> Sizes:
        """Return the shape of the result for so many samples."""
        if self.kernel == "filter":
            return self.weight
        if self.kernel == "data":
            return (size, self.channels, *self.image)
        return (size, self.filters, *self.outputs)

    def __str__(self) -> str:
        """Return it in one line."""
        image, window = _cross(self.image), _cross(self.window)
        more = [
            f"{name} {_cross(value)}"
            for name, value, plain in (
                ("stride", self.stride, 1),
                ("padding", self.padding, 0),
                ("dilation", self.dilation, 1),
            )
            if any(v != plain for v in value)
        ]
        more += [f"groups {self.groups}"] if self.groups > 1 else []
        shape = f"{self.channels}x{image} -> {self.filters}, window {window}"
        return ", ".join([f"{self.kernel} {shape}", *more])


def _cross(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
