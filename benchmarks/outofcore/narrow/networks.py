"""The networks whose lanes leave while they run, and their batches."""

from torch.nn import functional as F

from anybatch.cli.models.resnet import resnet20
from anybatch.cli.models.unet import UNet
from benchmarks.agbn.lanes_memory.one import Net

NETWORKS = {
    "U-Net": Net(lambda: UNet(width=16, norm="batch"), F.binary_cross_entropy_with_logits, 128, 16),
    "ResNet-20": Net(lambda: resnet20(norm="batch"), F.cross_entropy, 64, 32),
}
