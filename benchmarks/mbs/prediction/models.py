"""What is foreseen and measured: the usual networks, each with a loss and any number of rows.

DenseNet keeps every layer's output alive to the end of its block and joins them again for each
layer, so its peak is made of concatenations. An LSTM's kernel on the CPU keeps a workspace in
pages, which is learned from a few rows of zeros. The others are those of the command line
and of the other benchmarks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from anybatch.cli.models.resnet import resnet
from anybatch.cli.models.unet import UNet
from benchmarks.mbs.models import TransformerLM

WORDS = 256
LENGTH = 128
TIMES = 64


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, its loss, and what makes `size` rows for it."""

    model: nn.Module
    loss: Callable[..., Tensor]
    rows: Callable[[int], tuple[Tensor, Tensor]]


class Dense(nn.Module):
    """One layer of a dense block: what came in, with `growth` new channels beside it."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.bottleneck = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        )
        self.wide = nn.Sequential(
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, H, W] -> [n, channels + growth, H, W]."""
        return torch.cat([x, self.wide(self.bottleneck(x))], 1)


def densenet(
    blocks: tuple[int, ...] = (6, 12, 24, 16), growth: int = 16, classes: int = 10
) -> nn.Sequential:
    """A DenseNet for small images; the default blocks are those of DenseNet-121.

    Between two blocks the channels and the sides are halved. Source: Huang et al. 2016, Table 1.
    """
    channels = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for index, count in enumerate(blocks):
        if index:
            layers += [
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels // 2, 1, bias=False),
                nn.AvgPool2d(2),
            ]
            channels //= 2
        for _ in range(count):
            layers.append(Dense(channels, growth))
            channels += growth
    head = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(channels, classes))


class Recurrent(nn.Module):
    """An embedding, an LSTM of some layers, and a linear head on every time step."""

    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.cell = nn.LSTM(width, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, length] -> logits [n, length, words]."""
        out: Tensor = self.head(self.cell(self.embed(tokens))[0])
        return out


def next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every token, as a person writes it."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _images(side: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda size: (torch.randn(size, 3, side, side), torch.randint(10, (size,)))


def _masks(side: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda size: (
        torch.randn(size, 3, side, side),
        (torch.rand(size, 1, side, side) > 0.7).float(),
    )


def _tokens(length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def rows(size: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(WORDS, (size, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return rows


def _resnet(norm: str) -> Callable[[], Subject]:
    return lambda: Subject(
        resnet(50, num_classes=10, norm=norm), nn.CrossEntropyLoss(), _images(64)
    )


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "resnet50_batchnorm": _resnet("batch"),
    "resnet50_groupnorm": _resnet("group"),
    "unet": lambda: Subject(UNet(width=16), nn.BCEWithLogitsLoss(), _masks(64)),
    "transformer": lambda: Subject(
        TransformerLM(WORDS, width=128, layers=4, length=LENGTH), next_token, _tokens(LENGTH)
    ),
    "densenet": lambda: Subject(densenet(), nn.CrossEntropyLoss(), _images(32)),
    "lstm": lambda: Subject(Recurrent(), next_token, _tokens(TIMES)),
}
GOALS = dict.fromkeys(SUBJECTS, 0.01) | {"lstm": 0.02}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
