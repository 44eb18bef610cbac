"""Which layer to change, when memory is what keeps a network from a faster algorithm.

"The i-th layer can be sped up ten times and the j-th only twice": each layer's bytes could be freed
by a larger stride or by smaller filters, and what counts is what the program does with them.

    layer   change      frees      step before -> after
    conv2   stride 2    310 MiB    0.92 s -> 0.61 s       conv2 and conv3 now by FFT
    conv1   filter 9      1 MiB    0.92 s -> 0.92 s       nothing fits that did not

So every change is made, Equation 5 gives the bytes that it frees, and Equation 6 is solved again
with them. Seconds of the layers are those that were measured: a changed layer has less to compute,
which comes on top. Whether a changed network learns as well is not asked here.

Source: guide, section 3.1.4, "permit model adjustment".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from anybatch.errors import BudgetError
from benchmarks.simulators.layers import Convolution, Network, Pooling
from benchmarks.simulators.minibatch import Measured, choose


@dataclass(frozen=True)
class Change:
    """One layer changed, and what the bytes that it frees are good for.

    Attributes:
        place: of the layer among convolutions and pooling, from 0.
        what: "stride 2", "filter 3x3".
        frees: bytes.
        before: seconds of the step, infinite where nothing fits.
        after: seconds with these bytes.
    """

    place: int
    what: str
    frees: int
    before: float
    after: float

    @property
    def gains(self) -> float:
        """Seconds; infinite where nothing fitted before."""
        return 0.0 if self.after == self.before else self.before - self.after


def adjustments(
    network: Network, measured: Measured, samples: int, device: int, *, adds: bool = True
) -> list[Change]:
    """Return every change of one layer, those first that gain most, then those that free most.

    Args:
        network: layers.
        measured: of every layer that has a choice; see `benchmarks.simulators.minibatch`.
        samples: X_mini.
        device: M_GPU, bytes.
        adds: workspaces add up. Default True.

    Raises:
        ValueError: a layer was not measured at this mini-batch.
    """
    now = network.memory(samples).total
    before = _seconds(measured, samples, device - now, adds=adds)
    found = []
    for place, what, changed in _changed(network):
        frees = now - changed.memory(samples).total
        after = _seconds(measured, samples, device - now + frees, adds=adds)
        found.append(Change(place, what, frees, before, after))
    return sorted(found, key=lambda one: (-one.gains, -one.frees, one.place))


def _seconds(measured: Measured, samples: int, bound: int, *, adds: bool) -> float:
    try:
        return choose(measured, samples, bound, adds=adds).seconds
    except BudgetError:
        return inf


def _changed(network: Network) -> Iterator[tuple[int, str, Network]]:
    """Yield place, change and network, of those in which all windows still fit."""
    for place, layer in enumerate(network.extraction):
        for what, one in _variants(layer):
            layers = (*network.extraction[:place], one, *network.extraction[place + 1 :])
            changed = replace(network, extraction=layers)
            try:
                changed.shapes()
            except ValueError:
                continue
            yield place, what, changed


def _variants(layer: Convolution | Pooling) -> Iterator[tuple[str, Convolution | Pooling]]:
    yield f"stride {2 * layer.stride}", replace(layer, stride=2 * layer.stride)
    if isinstance(layer, Convolution) and layer.size > 2 and layer.padding > 0:
        size = layer.size - 2  # one less on each side: outputs are as large as before
        yield f"filter {size}x{size}", replace(layer, size=size, padding=layer.padding - 1)
