"""Padding is ignored, but each micro-batch divides by its own number of real tokens."""

import torch
from torch.nn.functional import cross_entropy

from anybatch import Engine


def loss_fn(logits, labels):
    """The mean over the tokens that are not padding."""
    return cross_entropy(logits.view(-1, 50), labels.view(-1))


torch.manual_seed(0)
model = torch.nn.Embedding(50, 50)
inputs, labels = torch.randint(50, (8, 12)), torch.randint(50, (8, 12))
labels[torch.arange(12) > torch.tensor([[1, 2, 3, 5, 7, 9, 11, 11]]).T] = -100
true, *_ = torch.autograd.grad(loss_fn(model(inputs), labels), model.weight)
for x, y in zip(inputs.split(2), labels.split(2), strict=True):
    (loss_fn(model(x), y) / 4).backward()
print(f"naive    {(model.weight.grad - true).norm() / true.norm():.1e}")
model.zero_grad()
Engine(model, loss_fn, micro_batch=2).backward(inputs, labels)
print(f"anybatch {(model.weight.grad - true).norm() / true.norm():.1e}")
