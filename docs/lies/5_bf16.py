"""A bfloat16 gradient keeps 8 bits: after many micro-batches it no longer grows."""

import torch
from torch.nn.functional import mse_loss

from anybatch import Engine

torch.manual_seed(0)
model = torch.nn.Linear(20, 1).bfloat16()
inputs = (torch.randn(2048, 20) + 0.5).bfloat16()
targets = inputs.float().sum(1, keepdim=True).bfloat16()
model.double()
true, *_ = torch.autograd.grad(mse_loss(model(inputs.double()), targets.double()), model.weight)
model.bfloat16()
for x, y in zip(inputs.split(1), targets.split(1), strict=True):
    (mse_loss(model(x), y) / 2048).backward()
print(f"naive    {(model.weight.grad - true).norm() / true.norm():.1e}")
model.zero_grad()
Engine(model, mse_loss, micro_batch=1).backward(inputs, targets)
print(f"anybatch {(model.weight.grad - true).norm() / true.norm():.1e}")
