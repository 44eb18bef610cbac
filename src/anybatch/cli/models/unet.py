"""U-Net: an encoder, a decoder, and a skip from each level of one to the same level of the other.

torch has no U-Net. This one pads its convolutions, so that the mask has the size of the image, and
normalises after each of them; otherwise it is the network of the paper: two 3x3 convolutions a
level, four times down by max-pooling, four times up by a 2x2 transposed convolution.

    x -> [w] ----------------------------------- cat -> [w] -> 1x1 -> logits
          | pool                                  ^ up
         [2w] ------------------------- cat -> [2w]
          | ...                          ^ ...
                        [16w] -----------|

Source: Ronneberger et al. 2015, Figure 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anybatch.cli.faults import ModelError
from anybatch.cli.models.norm import make_norm

LEVELS = 4


def _twice(inside: int, outside: int, norm: str) -> nn.Sequential:
    def once(channels: int) -> tuple[nn.Module, ...]:
        conv = nn.Conv2d(channels, outside, 3, padding=1, bias=False)
        return conv, make_norm(norm, outside), nn.ReLU(inplace=True)

    return nn.Sequential(*once(inside), *once(outside))


class UNet(nn.Module):
    """[N, in_channels, H, W] -> logits [N, num_classes, H, W]; H and W are multiples of 16.

    `width` is the number of channels of the first level, 64 in the paper.

    Source: Ronneberger et al. 2015, Figure 1.
    """

    def __init__(
        self, *, in_channels: int = 3, num_classes: int = 1, width: int = 64, norm: str = "group"
    ) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(LEVELS + 1)]
        inputs = [in_channels, *widths[:-1]]
        self.down = nn.ModuleList(_twice(i, o, norm) for i, o in zip(inputs, widths, strict=True))
        self.pool = nn.MaxPool2d(2)
        rising = list(reversed(widths[:-1]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in rising)
        self.merge = nn.ModuleList(_twice(2 * w, w, norm) for w in rising)
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of every pixel.

        Raises:
            ModelError: when the height or the width is no multiple of 16.
        """
        height, width = x.shape[-2:]
        if height % 2**LEVELS or width % 2**LEVELS:
            near = f"{max(16, height // 16 * 16)}x{max(16, width // 16 * 16)}"
            raise ModelError(
                "U-Net needs images whose height and width are multiples of 16; "
                f"got {height}x{width}. Use an image size or crop such as {near}."
            )
        skips = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips[:-1]), strict=True):
            x = merge(torch.cat([skip, up(x)], dim=1))
        return self.head(x)  # type: ignore[no-any-return]
