"""Dice is a ratio over the whole batch: the mean of the micro-batches' ratios is another loss."""

import torch

from anybatch import Engine


def dice(logits, masks):
    """One minus twice the overlap over the areas, of all pixels of the batch together."""
    share = logits.sigmoid()
    return 1 - 2 * (share * masks).sum() / (share.sum() + masks.sum())


torch.manual_seed(0)
model = torch.nn.Conv2d(1, 1, 3, padding=1)
masks = (torch.rand(8, 1, 16, 16) < torch.linspace(0.02, 0.6, 8).view(-1, 1, 1, 1)).float()
images = masks + 0.5 * torch.randn(8, 1, 16, 16)
true, *_ = torch.autograd.grad(dice(model(images), masks), model.weight)
for x, y in zip(images.split(2), masks.split(2), strict=True):
    (dice(model(x), y) / 4).backward()
print(f"naive    {(model.weight.grad - true).norm() / true.norm():.1e}")
model.zero_grad()
Engine(model, dice, micro_batch=2).backward(images, masks)
print(f"anybatch {(model.weight.grad - true).norm() / true.norm():.1e}")
