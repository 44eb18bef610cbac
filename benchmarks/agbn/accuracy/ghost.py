"""Local BatchNorm of several devices in one process, as one operation on a reshaped batch.

Data parallelism gives device g of G the rows g, g + G, g + 2G, ... of a mini-batch (torch's
DistributedSampler), and each device normalises its own by themselves. With the average of their
gradients that is one function of the whole batch: a BatchNorm whose channels are those of all
devices side by side, and the batch needs no copy to be seen so:

    [B, C, H, W]  is in memory  [B/G, G x C, H, W],  and channel g x C + c is channel c of device g

Every device has running statistics of its own; evaluation takes those of the first, because
DistributedDataParallel hands the buffers of rank 0 to all. torch's own check stands: a device whose
channels have a single value each (1 sample of 1x1) is refused.

Source: Hoffer et al. 2017, "Train longer, generalize better", Algorithm 1 (Ghost BatchNorm).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GhostBatchNorm2d(nn.Module):
    """BatchNorm2d as `groups` devices compute it, each on its rows g, g + groups, ...

    Args:
        channels: C.
        groups: devices; a mini-batch in train mode is a multiple of it.
        eps: as in torch.
        momentum: as in torch.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, channels: int, groups: int, eps: float = 1e-5, momentum: float = 0.1
    ) -> None:
        super().__init__()
        self.groups, self.eps, self.momentum = groups, eps, momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(groups, channels))
        self.register_buffer("running_var", torch.ones(groups, channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to the same shape.

        Raises:
            ValueError: in train mode, B is no multiple of `groups`, or (torch's own) a device has
                one value per channel.
        """
        if not self.training:
            first = self.running_mean[0], self.running_var[0]
            return F.batch_norm(x, *first, self.weight, self.bias, eps=self.eps)
        batch, channels, *pixels = x.shape
        if batch % self.groups:
            raise ValueError(
                f"every device must get as many samples; got {batch} samples for {self.groups} "
                "devices: take a multiple"
            )
        grouped = x.reshape(batch // self.groups, self.groups * channels, *pixels)
        normalised = F.batch_norm(
            grouped,
            self.running_mean.view(-1),
            self.running_var.view(-1),
            self.weight.repeat(self.groups),
            self.bias.repeat(self.groups),
            training=True,
            momentum=self.momentum,
            eps=self.eps,
        )
        return normalised.reshape(x.shape)


def ghosted(model: nn.Module, groups: int) -> nn.Module:
    """Return the model with each new BatchNorm2d replaced by that of `groups` devices."""
    for name, child in model.named_children():
        if isinstance(child, nn.BatchNorm2d):
            assert child.momentum is not None
            assert child.affine
            new = GhostBatchNorm2d(child.num_features, groups, child.eps, child.momentum)
            setattr(model, name, new.to(child.weight.dtype))
        else:
            ghosted(child, groups)
    return model
