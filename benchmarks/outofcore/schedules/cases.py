"""What is planned: networks and batch sizes, machines, and the figures that the paper prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anybatch.cli.models.resnet import resnet
from anybatch.cli.models.unet import UNet
from anybatch.core.plan_sections import Link
from anybatch.offloading.schedule import Trace
from benchmarks.outofcore.models import DeepLabV3Plus, densenet121, pix2pixhd
from benchmarks.simulators.machine import Machine
from benchmarks.simulators.tracing import trace_step

BUDGET = 16 << 30


@dataclass(frozen=True)
class Network:
    """A network at the image size of the paper.

    Attributes:
        title: its name in tables.
        make: makes it.
        loss: of outputs and targets.
        inputs: shape of a sample.
        targets: shape of its target.
        dtype: of the targets.
        sizes: samples in the mini-batches that are planned.
        paper: the largest batches that the paper trained: in memory, scheduled, and with virtual
            addressing; None where it does not say.
    """

    title: str
    make: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    dtype: torch.dtype
    sizes: tuple[int, ...]
    paper: str

    def trace(self, model: nn.Module, n: int) -> Trace:
        """Return the trace of a step of `n` samples."""
        inputs, targets = (n, *self.inputs), (n, *self.targets)
        return trace_step(model, self.loss, inputs, targets, target_dtype=self.dtype)


NETWORKS = {
    "resnet50": Network(
        "ResNet-50, 224x224",
        lambda: resnet(50, norm="batch"),
        nn.CrossEntropyLoss(),
        (3, 224, 224),
        (),
        torch.long,
        (190, 256, 512, 928, 1120, 1248, 1440),
        "190 in memory, 928 scheduled, 1440 with virtual addressing",
    ),
    "densenet121": Network(
        "DenseNet-121, 224x224",
        densenet121,
        nn.CrossEntropyLoss(),
        (3, 224, 224),
        (),
        torch.long,
        (128, 256, 512, 768, 1024),
        "512 in memory, 1.5x scheduled, 1.5x to 2x of that with virtual addressing",
    ),
    "unet": Network(
        "U-Net, 512x512",
        lambda: UNet(norm="batch"),
        nn.BCEWithLogitsLoss(),
        (3, 512, 512),
        (1, 512, 512),
        torch.float32,
        (8, 16, 32, 48),
        "not among its experiments",
    ),
    "deeplab": Network(
        "DeepLabv3+, 513x513",
        DeepLabV3Plus,
        nn.CrossEntropyLoss(),
        (3, 513, 513),
        (513, 513),
        torch.long,
        (6, 12, 32, 48, 64),
        "6 in memory, 5.3x scheduled, 1.5x to 2x of that with virtual addressing",
    ),
    "pix2pixhd": Network(
        "Pix2PixHD's generator, 512x1024",
        pix2pixhd,
        nn.L1Loss(),
        (36, 512, 1024),
        (3, 512, 1024),
        torch.float32,
        (4, 8, 16, 32, 40),
        "4 in memory, 4x scheduled, 1.5x to 2x of that with virtual addressing",
    ),
}

NVLINK = Machine("V100, NVLink", 15.7e12, 900e9, Link(50e9, 50e9))
"""Its `scale` is that of ResNet-50 at 190 samples, which the paper measured."""

MACHINES = (
    NVLINK,
    Machine("25 TF, PCIe 4", 25e12, 1.5e12, Link(25e9, 25e9)),
    Machine("H200, PCIe 5", 250e12, 4.8e12, Link(55e9, 55e9)),
)
WIDE = Link(100e9, 100e9)
"""The paper's link, if each of its two NVLinks moves 50 GB/s each way."""

MEASURED = ("resnet50", 190, 581.0)
"""Network, samples, and images a second in memory, in the paper's Table 1: its last baseline."""

TABLE_1 = {
    "in memory": {64: 336, 128: 492, 190: 581},
    "schedule": {64: 320, 128: 439, 190: 533, 256: 559, 512: 457, 928: 400},
    "schedule + virtual addressing": {
        64: 304,
        128: 389,
        190: 415,
        256: 424,
        512: 446,
        928: 409,
        1120: 398,
        1248: 347,
        1440: 321,
    },
}
"""Images a second on a V100, printed in Table 1; batch sizes that are missing did not fit."""
