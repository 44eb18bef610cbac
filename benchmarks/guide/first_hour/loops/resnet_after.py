"""A ResNet with automatic mixed precision, gradient clipping and an average of its weights."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import anybatch


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.two = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x):
        y = torch.relu(self.norms[0](self.one(x)))
        return torch.relu(x + self.norms[1](self.two(y)))


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), Block(16), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten()
)
model.append(nn.Linear(16, 10))
images, labels = torch.randn(64, 3, 16, 16), torch.randint(10, (64,))
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
engine = anybatch.Engine(model, criterion, optimizer, memory="1.5MiB")

for step in range(6):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = engine.backward(images, labels)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    average.update_parameters(model)
    print(f"step {step} loss {loss.item():.6f}")
