"""The last micro-batch is smaller, and naive accumulation counts it as much as the others."""

import torch
from torch.nn.functional import cross_entropy

from anybatch import Engine

torch.manual_seed(0)
model = torch.nn.Linear(20, 5)
inputs, labels = torch.randn(10, 20), torch.randint(5, (10,))
true, *_ = torch.autograd.grad(cross_entropy(model(inputs), labels), model.weight)
for x, y in zip(inputs.split(4), labels.split(4), strict=True):
    (cross_entropy(model(x), y) / 3).backward()
print(f"naive    {(model.weight.grad - true).norm() / true.norm():.1e}")
model.zero_grad()
Engine(model, cross_entropy, micro_batch=4).backward(inputs, labels)
print(f"anybatch {(model.weight.grad - true).norm() / true.norm():.1e}")
