"""The networks of the paper at its image sizes, in plain torch: only their shapes are used.

ResNet-50 and U-Net are those of the command line. The others are written here from their papers,
with the normalisation of these; ReLUs work in place, as they do in the authors' programs.

Sources: Huang et al. 2017, Table 1 (DenseNet-121); Chen et al. 2018, Figures 2 and 4 and section
3.2 (DeepLabv3+ with the modified Aligned Xception-65, output stride 16); Wang et al. 2018,
section 3.1 and appendix (Pix2PixHD: the global generator, 9 residual blocks).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

ASPP_RATES = (6, 12, 18)


class Dense(nn.Module):
    """One layer of a dense block: all that came before is joined, and 32 channels are made."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.make = nn.Sequential(
            *_norm_relu(channels),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            *_norm_relu(4 * growth),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, states: list[Tensor]) -> list[Tensor]:
        """Every [n, c, H, W] so far -> the same, and one more."""
        return [*states, self.make(torch.cat(states, 1))]


class DenseBlock(nn.Module):
    """A row of such layers, joined at the end."""

    def __init__(self, count: int, channels: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dense(channels + k * growth, growth) for k in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """[n, c, H, W] -> [n, c + count * growth, H, W]."""
        states = [x]
        for layer in self.layers:
            states = layer(states)
        return torch.cat(states, 1)


def densenet121(
    classes: int = 1000, growth: int = 32, counts: tuple[int, ...] = (6, 12, 24, 16)
) -> nn.Sequential:
    """DenseNet-121: [n, 3, 224, 224] -> logits [n, 1000]; 8.0 million parameters.

    Other counts of layers in its blocks make other DenseNets.
    """
    channels = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 7, 2, 3, bias=False), *_norm_relu(channels)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    for index, count in enumerate(counts):
        if index:
            half = channels // 2
            layers += [*_norm_relu(channels), nn.Conv2d(channels, half, 1, bias=False)]
            layers.append(nn.AvgPool2d(2))
            channels = half
        layers.append(DenseBlock(count, channels, growth))
        channels += count * growth
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, *_norm_relu(channels), *head)


def _norm_relu(channels: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]


def _conv(inside: int, outside: int, kernel: int, stride: int = 1, rate: int = 1) -> nn.Sequential:
    padding = rate * (kernel // 2)
    conv = nn.Conv2d(inside, outside, kernel, stride, padding, rate, bias=False)
    return nn.Sequential(conv, *_norm_relu(outside))


def _separable(inside: int, outside: int, stride: int = 1, rate: int = 1) -> nn.Sequential:
    """A 3x3 convolution of each channel, then a 1x1 of all; both are normalised."""
    depth = nn.Conv2d(inside, inside, 3, stride, rate, rate, groups=inside, bias=False)
    return nn.Sequential(depth, *_norm_relu(inside), _conv(inside, outside, 1))


class XceptionBlock(nn.Module):
    """Three separable convolutions beside a shortcut; the last one has the stride."""

    def __init__(self, widths: tuple[int, int, int, int], stride: int = 1, rate: int = 1) -> None:
        super().__init__()
        a, b, c, d = widths
        parts = (_separable(a, b, 1, rate), _separable(b, c, 1, rate))
        self.branch = nn.Sequential(*parts, _separable(c, d, stride, rate))
        same = a == d and stride == 1
        shortcut = nn.Sequential(nn.Conv2d(a, d, 1, stride, bias=False), nn.BatchNorm2d(d))
        self.shortcut: nn.Module = nn.Identity() if same else shortcut

    def forward(self, x: Tensor) -> Tensor:
        """[n, a, H, W] -> [n, d, H / stride, W / stride]."""
        out: Tensor = self.branch(x) + self.shortcut(x)
        return out


class DeepLabV3Plus(nn.Module):
    """[n, 3, 513, 513] -> logits [n, 21, 513, 513]."""

    def __init__(self, classes: int = 21) -> None:
        super().__init__()
        stem = (_conv(3, 32, 3, 2), _conv(32, 64, 3))
        self.low = nn.Sequential(*stem, XceptionBlock((64, 128, 128, 128), 2))
        entry = (XceptionBlock((128, 256, 256, 256), 2), XceptionBlock((256, 728, 728, 728), 2))
        middle = (XceptionBlock((728, 728, 728, 728)) for _ in range(16))
        last = (_separable(1024, 1536, rate=2), _separable(1536, 1536, rate=2))
        leaves = (XceptionBlock((728, 728, 1024, 1024), rate=2), *last)
        self.high = nn.Sequential(*entry, *middle, *leaves, _separable(1536, 2048, rate=2))
        self.pyramid = nn.ModuleList(
            [_conv(2048, 256, 1), *(_separable(2048, 256, rate=rate) for rate in ASPP_RATES)]
        )
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), _conv(2048, 256, 1))
        self.joined = _conv(5 * 256, 256, 1)
        self.project = _conv(128, 48, 1)
        self.decoder = nn.Sequential(_separable(256 + 48, 256), _separable(256, 256))
        self.head = nn.Conv2d(256, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of every pixel."""
        low = self.low(x)
        high = self.high(low)
        pooled = self.pooled(high).expand(-1, -1, *high.shape[2:])
        wide = self.joined(torch.cat([*(part(high) for part in self.pyramid), pooled], 1))
        joined = torch.cat([_resized(wide, low), self.project(low)], 1)
        return _resized(self.head(self.decoder(joined)), x)


def _resized(x: Tensor, like: Tensor) -> Tensor:
    size = (like.shape[2], like.shape[3])
    return functional.interpolate(x, size, mode="bilinear", align_corners=False)


class Reflected(nn.Module):
    """A branch of two 3x3 convolutions over reflected borders, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        conv = (nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width))
        again = (nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width))
        self.branch = nn.Sequential(*conv, nn.ReLU(inplace=True), *again)

    def forward(self, x: Tensor) -> Tensor:
        """[n, width, H, W] -> the same shape."""
        out: Tensor = x + self.branch(x)
        return out


def pix2pixhd(labels: int = 36, width: int = 64, halvings: int = 4, blocks: int = 9) -> nn.Module:
    """Pix2PixHD's global generator: labels [n, 36, 512, 1024] -> images [n, 3, 512, 1024].

    Four times down, nine residual blocks, four times up.
    """

    def finish(channels: int) -> tuple[nn.Module, nn.Module]:
        return nn.InstanceNorm2d(channels), nn.ReLU(inplace=True)

    layers: list[nn.Module] = [nn.ReflectionPad2d(3), nn.Conv2d(labels, width, 7), *finish(width)]
    for k in range(halvings):
        wide = width << (k + 1)
        layers += [nn.Conv2d(wide // 2, wide, 3, 2, 1), *finish(wide)]
    layers += [Reflected(width << halvings) for _ in range(blocks)]
    for k in reversed(range(halvings)):
        wide = width << (k + 1)
        up = nn.ConvTranspose2d(wide, wide // 2, 3, 2, 1, output_padding=1)
        layers += [up, *finish(wide // 2)]
    return nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh())
