"""What is trained: a ResNet, its images, the batches, and the memory that the device is held to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from anybatch.cli.models.resnet import resnet, resnet20
from anybatch.offloading.schedule import Trace
from benchmarks.outofcore.schedules.cases import NETWORKS, TABLE_1
from benchmarks.simulators.tracing import trace_step

Ways = tuple[str, ...]


@dataclass(frozen=True)
class Setting:
    """A row of steps.

    Attributes:
        depth: of the ResNet; 20 is the one for small images.
        image: pixels of a side.
        sizes: samples in a mini-batch.
        cap: bytes of the device.
        shares: of the cap, what `anybatch.offload` is given: the first with which a step runs.
        ways: what is compared.
        small: bytes below which a tensor stays, in the trace of the bound.
    """

    depth: int
    image: int
    sizes: tuple[int, ...]
    cap: int
    shares: tuple[float, ...]
    ways: Ways
    small: int = 1 << 16

    def model(self) -> nn.Sequential:
        """Make the network."""
        return resnet20(norm="batch") if self.depth == 20 else resnet(self.depth, norm="batch")

    def trace(self, n: int) -> Trace:
        """Return the trace of a step."""
        inputs = (n, 3, self.image, self.image)
        return trace_step(self.model(), nn.CrossEntropyLoss(), inputs, (n,), small=self.small)


MEMORY, CACHING, EXPANDABLE = "in memory", "offload, caching", "offload"
SAVED, AGAIN = "save_on_cpu", "recomputation"
PAPER = Setting(
    depth=50,
    image=224,
    sizes=tuple(sorted({*TABLE_1["in memory"], *NETWORKS["resnet50"].sizes})),
    cap=16 << 30,
    shares=(15 / 16, 7 / 8, 3 / 4, 5 / 8, 1 / 2),
    ways=(MEMORY, CACHING, EXPANDABLE, SAVED, AGAIN),
)
QUICK = Setting(
    depth=20,
    image=16,
    sizes=(4, 16),
    cap=7 << 20,
    shares=(1.0, 0.8),
    ways=(MEMORY, EXPANDABLE, AGAIN),
)
"""On the CPU bytes are counted, not refused, and nothing stands in the way of fragments."""
SETTINGS = {"paper": PAPER, "quick": QUICK}
