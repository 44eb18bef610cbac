"""A U-Net with BatchNorm, and BCE + Dice over the batch."""

import torch
from torch import nn
from torch.nn import functional as F

import anybatch


def twice(before, after):
    layers = [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    layers += [nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep = twice(3, 8), twice(8, 16)
        self.up, self.last = twice(24, 8), nn.Conv2d(8, 1, 1)

    def forward(self, x):
        skip = self.down(x)
        deep = F.interpolate(self.deep(F.max_pool2d(skip, 2)), scale_factor=2.0)
        return self.last(self.up(torch.cat([skip, deep], 1)))


def bce_dice(logits, masks):
    p = logits.sigmoid()
    dice = (2 * (p * masks).sum() + 1) / (p.sum() + masks.sum() + 1)
    return F.binary_cross_entropy_with_logits(logits, masks) + 1 - dice


torch.manual_seed(0)
model = UNet()
images = torch.randn(16, 3, 32, 32)
masks = (images.mean(1, keepdim=True) > 0.2).float()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
engine = anybatch.Engine(model, bce_dice, optimizer, memory="3MiB")

for step in range(6):
    optimizer.zero_grad()
    loss = engine.backward(images, masks)
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
