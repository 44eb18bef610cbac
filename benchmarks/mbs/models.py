"""Small models of the usual kinds, in plain torch, for the benchmarks.

They normalise with GroupNorm or LayerNorm, so that a sample never sees another one and the
loops by hand can be exact. Widths are small: a step on two CPU cores takes a fraction of a
second. They are not the models of the command line.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


def _conv(n_in: int, n_out: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False),
        nn.GroupNorm(min(4, n_out // 2), n_out),
    )


class Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, n_in: int, n_out: int, stride: int = 1) -> None:
        super().__init__()
        self.first, self.second = _conv(n_in, n_out, stride), _conv(n_out, n_out)
        same = n_in == n_out and stride == 1
        self.short: nn.Module = nn.Identity() if same else nn.Conv2d(n_in, n_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[n, n_in, H, W] -> [n, n_out, H/stride, W/stride]."""
        return functional.relu(self.second(functional.relu(self.first(x))) + self.short(x))


class ResNet(nn.Module):
    """A ResNet for small images: `blocks` residual blocks in each stage (2, 2, 2, 2 is 18)."""

    def __init__(
        self, classes: int = 10, width: int = 16, blocks: tuple[int, ...] = (2, 2, 2, 2)
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(3, width), nn.ReLU()]
        n_in = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage and not block else 1
                layers.append(Residual(n_in, width << stage, stride))
                n_in = width << stage
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(n_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 3, H, W] -> logits [n, classes]."""
        out: Tensor = self.head(self.body(x).mean((2, 3)))
        return out


class UNet(nn.Module):
    """A U-Net of `depth` halvings with skip connections."""

    def __init__(self, channels: int = 3, classes: int = 1, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        sizes = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            [self._twice(n_in, n) for n_in, n in zip([channels, *sizes], sizes, strict=False)]
        )
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in reversed(sizes[:-1])]
        )
        self.mix = nn.ModuleList([self._twice(2 * n, n) for n in reversed(sizes[:-1])])
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _twice(n_in: int, n: int) -> nn.Sequential:
        return nn.Sequential(_conv(n_in, n), nn.ReLU(), _conv(n, n), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels, H, W] -> logits [n, classes, H, W]."""
        skips: list[Tensor] = []
        for block in self.down:
            x = block(x if not skips else functional.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, mix in zip(self.up, self.mix, strict=True):
            x = mix(torch.cat([up(x), skips.pop()], 1))
        out: Tensor = self.head(x)
        return out


class Attention(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width] -> the same shape."""
        n, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(n, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class TransformerLM(nn.Module):
    """A causal language model; `tied` shares the embedding with the output layer."""

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        length: int = 64,
        *,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Attention(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, length] -> logits [n, length, vocabulary]."""
        x = self.blocks(self.embed(tokens) + self.position[: tokens.shape[1]])
        out: Tensor = self.head(self.norm(x))
        return out


class LSTM(nn.Module):
    """An embedding, one LSTM and a linear head on every time step."""

    def __init__(self, vocabulary: int = 64, width: int = 32, outputs: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.cell = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, length] -> [n, length, outputs]."""
        out: Tensor = self.head(self.cell(self.embed(tokens))[0])
        return out


class MLP(nn.Sequential):
    """Linear layers with GELU between them: `MLP(in, hidden, ..., out)`."""

    def __init__(self, *sizes: int) -> None:
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(sizes):
            layers += [nn.Linear(n_in, n_out), nn.GELU()]
        super().__init__(*layers[:-1])
