"""Encoders with random weights and rows for them, made on the spot: pairs that belong together."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.cli.models.resnet import resnet20

WORDS, LENGTH, D = 1000, 16, 64


class Text(nn.Module):
    """A small transformer: [n, length] token ids -> [n, d], of length 1."""

    def __init__(
        self,
        width: int = D,
        layers: int = 2,
        dropout: float = 0.0,
        d: int = D,
        length: int = LENGTH,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, d)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, length] -> [n, d]."""
        hidden = self.body(self.words(tokens) + self.places)
        return F.normalize(self.head(hidden.mean(1)), dim=1)


class Image(nn.Module):
    """A few convolutions: [n, 3, 16, 16] -> [n, d], of length 1."""

    def __init__(self, width: int = 16, d: int = D) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width), nn.GELU()),
            *(nn.Conv2d(width, 2 * width, 3, 2, padding=1), nn.GroupNorm(4, 2 * width), nn.GELU()),
            *(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.GELU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, d)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, 16, 16] -> [n, d]."""
        return F.normalize(self.body(x), dim=1)


class ResNet(nn.Module):
    """ResNet-20 with GroupNorm: [n, 3, 32, 32] -> [n, d], of length 1."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.body = resnet20(num_classes=d)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, 32, 32] -> [n, d]."""
        return F.normalize(self.body(x), dim=1)


@dataclass(frozen=True)
class Subject:
    """What is trained: two encoders, perhaps the same one twice, and rows for them by number."""

    encoders: Callable[[], tuple[nn.Module, nn.Module]]
    rows: Callable[[int], tuple[Tensor, Tensor]]


def sentences(dropout: float = 0.0) -> tuple[nn.Module, nn.Module]:
    """One encoder for both."""
    torch.manual_seed(0)
    one = Text(dropout=dropout)
    return one, one


def images_and_texts() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return Image(), Text()


def real_sized() -> tuple[nn.Module, nn.Module]:
    """ResNet-20 for images of 32x32 and four layers for texts of 32, embeddings of 128."""
    torch.manual_seed(0)
    return ResNet(128), Text(width=128, layers=4, d=128, length=32)


def texts(count: int, seed: int = 0, length: int = LENGTH) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (count, length), generator=rng)


def images(count: int, side: int = 16) -> Tensor:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, side, side, generator=rng)


SUBJECTS = {
    "sentences": Subject(sentences, lambda count: (texts(count), texts(count, 1))),
    "sentences, dropout": Subject(
        lambda: sentences(0.1), lambda count: (texts(count), texts(count, 1))
    ),
    "images and texts": Subject(images_and_texts, lambda count: (images(count), texts(count))),
}
REAL = Subject(real_sized, lambda count: (images(count, 32), texts(count, length=32)))
