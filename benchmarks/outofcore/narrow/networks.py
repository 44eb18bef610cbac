"""The networks whose lanes leave while they run, and their batches."""

from torch.nn import functional as F

from anybatch.apps.models.resnet import resnet20
from anybatch.apps.models.unet import UNet
from benchmarks.agbn.lanes_memory.one import Net
from benchmarks.mbs.prediction.models import densenet

NETWORKS = {
    "DenseNet of 4, 8 and 6 layers": Net(lambda: densenet((4, 8, 6)), F.cross_entropy, 96, 16),
    "U-Net": Net(lambda: UNet(width=16, norm="batch"), F.binary_cross_entropy_with_logits, 128, 16),
    "ResNet-20": Net(lambda: resnet20(norm="batch"), F.cross_entropy, 64, 32),
}
