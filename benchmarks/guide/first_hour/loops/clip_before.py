"""A CLIP of two small encoders, with a learned temperature."""

import torch
from torch import nn
from torch.nn import functional as F


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        layers = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.image = nn.Sequential(*layers, nn.Linear(32, 32))
        self.text = nn.Sequential(nn.EmbeddingBag(100, 64), nn.ReLU(), nn.Linear(64, 32))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, texts):
        image, text = F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)
        return image, text, self.scale.exp()


def clip_loss(image, text, scale):
    logits = scale * image @ text.T
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


torch.manual_seed(0)
model = CLIP()
images, texts = torch.randn(128, 3, 8, 8), torch.randint(100, (128, 6))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(6):
    optimizer.zero_grad()
    loss = clip_loss(*model(images, texts))
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
