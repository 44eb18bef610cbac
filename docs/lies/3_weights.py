"""With class weights the mean divides by the weights it saw: each micro-batch by others."""

import torch

from anybatch import Engine

torch.manual_seed(0)
model = torch.nn.Linear(20, 3)
inputs, labels = torch.randn(12, 20), torch.tensor([0] * 8 + [1, 1, 2, 2])
loss_fn = torch.nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0]))
true, *_ = torch.autograd.grad(loss_fn(model(inputs), labels), model.weight)
for x, y in zip(inputs.split(4), labels.split(4), strict=True):
    (loss_fn(model(x), y) / 3).backward()
print(f"naive    {(model.weight.grad - true).norm() / true.norm():.1e}")
model.zero_grad()
Engine(model, loss_fn, micro_batch=4).backward(inputs, labels)
print(f"anybatch {(model.weight.grad - true).norm() / true.norm():.1e}")
