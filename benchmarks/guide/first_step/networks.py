"""The networks of the first step: one of every kind that has taken long to plan."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.mbs.models import TransformerLM, UNet
from benchmarks.mbs.speed.problems import bce_dice


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, its loss (None: the model returns it) and a batch of `size` samples."""

    model: nn.Module
    loss_fn: Callable[..., Tensor] | None
    inputs: Any
    targets: Any
    size: int


def _next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def mlp() -> Subject:
    """An MLP with BatchNorm, 1,024 rows of 64 numbers."""
    layers: list[nn.Module] = []
    for n_in in (64, 512, 512):
        layers += [nn.Linear(n_in, 512), nn.BatchNorm1d(512), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    inputs, targets = torch.randn(1024, 64), torch.randint(10, (1024,))
    return Subject(model, nn.CrossEntropyLoss(), inputs, targets, 1024)


def unet() -> Subject:
    """A U-Net with BCE + Dice over the batch, 24 images of 96x96."""
    targets = (torch.rand(24, 1, 96, 96) > 0.7).float()
    return Subject(UNet(), bce_dice, torch.randn(24, 3, 96, 96), targets, 24)


def language() -> Subject:
    """A causal transformer of 4 layers and 1,000 words, 32 rows of 64 tokens."""
    tokens = torch.randint(1000, (32, 65))
    model = TransformerLM(1000, 128, 4)
    return Subject(model, _next_token, tokens[:, :-1], tokens[:, 1:], 32)


def resnet() -> Subject:
    """Eight convolutions with BatchNorm in residual blocks, 64 images of 32x32."""

    class Block(nn.Module):
        def __init__(self, n_in: int, n_out: int, stride: int) -> None:
            super().__init__()
            self.one = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
            self.two = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
            self.norms = nn.ModuleList([nn.BatchNorm2d(n_out), nn.BatchNorm2d(n_out)])
            self.short = nn.Conv2d(n_in, n_out, 1, stride)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norms[0](self.one(x)).relu()
            out: Tensor = (self.norms[1](self.two(y)) + self.short(x)).relu()
            return out

    blocks = [Block(3, 16, 1), Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    inputs, targets = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    return Subject(model, nn.CrossEntropyLoss(), inputs, targets, 64)


class Unrolled(nn.Module):
    """A tanh cell, called in a loop over time."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(16, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[n, time, 16] -> logits [n, 4]."""
        state = x.new_zeros(len(x), self.cell.hidden_size)
        for moment in x.unbind(1):
            state = self.cell(moment, state)
        out: Tensor = self.head(state)
        return out


def unrolled(steps: int = 100) -> Subject:
    """A net that is unrolled over time in Python, 64 rows."""
    inputs, targets = torch.randn(64, steps, 16), torch.randint(4, (64,))
    return Subject(Unrolled(), nn.CrossEntropyLoss(), inputs, targets, 64)


def long_unrolled() -> Subject:
    """The same over 1,000 time steps."""
    return unrolled(1000)


def clip() -> Subject:
    """Two encoders and a contrastive loss between 64 images and captions."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.images = nn.Sequential(
                nn.Conv2d(3, 32, 4, 4),
                nn.GELU(),
                nn.Conv2d(32, 64, 3, padding=1),
                nn.GELU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(64, 64),
            )
            self.words = TransformerLM(256, 64, 2, length=32)
            self.shrink = nn.Linear(256, 64)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, images: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
            pair = self.images(images), self.shrink(self.words(words).mean(1))
            one, other = (functional.normalize(each, dim=1) for each in pair)
            return one * self.scale.exp(), other

    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        logits = outputs[0] @ outputs[1].T
        own = torch.arange(len(logits), device=logits.device)
        return (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own)) / 2

    inputs = torch.randn(64, 3, 32, 32), torch.randint(256, (64, 32))
    return Subject(Both(), loss, inputs, None, 64)


def diffusion() -> Subject:
    """A U-Net with GroupNorm that predicts noise at a time step, 32 images of 32x32."""

    class Denoise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.time = UNet(3, 3, 16, 2), nn.Linear(32, 3)

        def forward(self, x: Tensor, moments: Tensor) -> Tensor:
            waves = moments[:, None] * torch.arange(1, 17, device=x.device) / 100
            shift = self.time(torch.cat([waves.sin(), waves.cos()], 1))
            out: Tensor = self.net(x + shift[..., None, None])
            return out

    noise = torch.randn(32, 3, 32, 32)
    return Subject(Denoise(), nn.MSELoss(), (noise, torch.rand(32) * 1000), noise.clone(), 32)


def mixtral() -> Subject:
    """A transformer with four experts for each token, from transformers, 16 rows of 32 tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    config._experts_implementation = "eager"  # samples meet in grouped_mm: it is refused divided
    tokens = torch.randint(500, (16, 32))
    rows = {"input_ids": tokens, "labels": tokens}
    return Subject(MixtralForCausalLM(config), None, rows, None, 16)


def volumes() -> Subject:
    """A 3D network down and up again with per-voxel cross-entropy, 8 volumes of 24x24x24."""
    body = [nn.Conv3d(1, 12, 3, padding=1), nn.GroupNorm(4, 12), nn.ReLU()]
    body += [nn.Conv3d(12, 24, 3, 2, 1), nn.GroupNorm(4, 24), nn.ReLU()]
    body += [nn.ConvTranspose3d(24, 12, 2, 2), nn.ReLU(), nn.Conv3d(12, 3, 1)]
    inputs, targets = torch.randn(8, 1, 24, 24, 24), torch.randint(3, (8, 24, 24, 24))
    return Subject(nn.Sequential(*body), nn.CrossEntropyLoss(), inputs, targets, 8)


def speech() -> Subject:
    """A bidirectional LSTM with CTC, 16 rows of 64 frames and 8 letters."""

    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(40, 96, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(192, 30)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.cell(x)[0]).log_softmax(-1)
            return out

    def loss(outputs: Tensor, targets: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        letters, frames, lengths = targets
        return functional.ctc_loss(outputs.transpose(0, 1), letters, frames, lengths)

    targets = torch.randint(1, 30, (16, 8)), torch.full((16,), 64), torch.randint(4, 9, (16,))
    return Subject(Frames(), loss, torch.randn(16, 64, 40), targets, 16)


NETWORKS: dict[str, Callable[[], Subject]] = {
    "MLP, BatchNorm": mlp,
    "U-Net, Dice": unet,
    "language model": language,
    "ResNet, BatchNorm": resnet,
    "unrolled, T=100": unrolled,
    "unrolled, T=1000": long_unrolled,
    "CLIP": clip,
    "diffusion U-Net": diffusion,
    "Mixtral": mixtral,
    "3D U-Net": volumes,
    "BiLSTM, CTC": speech,
}
