"""AmoebaNet-D: the evolved image classifier that MBS trains, of any depth and width.

torch has no AmoebaNet. A network is a row of cells; a cell makes five sums of two operations each,
every operation reading an earlier state of the cell, and concatenates the unread sums:

    state 0 = output of the last cell, state 1 = output of the cell before it (both 1x1-projected)
    state 2 + k = op_a(state i_a) + op_b(state i_b),  k = 0..4

The architecture is the two tables below. The paper's figure and the authors' program disagree on
what a normal cell concatenates; the program's choice, [0, 3, 4, 6], is the one that gives the
parameter counts of GPipe's Table 1, so it is used.

Sources: Real et al. 2018, "Regularized evolution", Figure 4 and section "AmoebaNet-D"; Huang et al.
2018, "GPipe", Table 1. torchgpipe's benchmark was read for the indices; two things differ from it:
its max_pool_3x3 averages, here it takes the maximum, as its name and the paper say; and its stem
cuts the negative half off a normalised image, here no ReLU stands before the first convolution.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anybatch.cli.faults import ModelError
from anybatch.cli.models.norm import make_norm

MakeNorm = Callable[[int], nn.Module]
Gene = tuple[int, str]  # the state that is read, the operation

NORMAL: tuple[Gene, ...] = (
    *((1, "conv_1x1"), (1, "max_3x3")),
    *((1, "identity"), (0, "conv_1x7_7x1")),
    *((0, "conv_1x1"), (0, "conv_1x7_7x1")),
    *((2, "max_3x3"), (2, "identity")),
    *((1, "mean_3x3"), (5, "conv_1x1")),
)
NORMAL_CONCAT = (0, 3, 4, 6)
REDUCTION: tuple[Gene, ...] = (
    *((0, "max_2x2"), (0, "max_3x3")),
    *((2, "identity"), (1, "conv_3x3")),
    *((2, "conv_1x7_7x1"), (2, "max_3x3")),
    *((3, "identity"), (1, "max_2x2")),
    *((2, "mean_3x3"), (3, "conv_1x1")),
)
REDUCTION_CONCAT = (4, 5, 6)


def _relu_conv(
    inside: int,
    outside: int,
    norm: MakeNorm,
    kernel: tuple[int, int] = (1, 1),
    stride: tuple[int, int] = (1, 1),
) -> list[nn.Module]:
    padding = (kernel[0] // 2, kernel[1] // 2)
    conv = nn.Conv2d(inside, outside, kernel, stride, padding, bias=False)
    return [nn.ReLU(), conv, norm(outside)]


def _bottleneck(channels: int, norm: MakeNorm, *middle: list[nn.Module]) -> nn.Module:
    """Project to a quarter of the channels, do the middle there, project back."""
    quarter = channels // 4
    first, last = _relu_conv(channels, quarter, norm), _relu_conv(quarter, channels, norm)
    return nn.Sequential(*first, *(m for part in middle for m in part), *last)


def _operation(name: str, channels: int, stride: int, norm: MakeNorm) -> nn.Module:
    quarter = channels // 4
    make: dict[str, Callable[[], nn.Module]] = {
        "identity": nn.Identity,  # both tables read it inside a cell only, where the stride is 1
        "max_2x2": lambda: nn.MaxPool2d(2, stride, ceil_mode=True),
        "max_3x3": lambda: nn.MaxPool2d(3, stride, padding=1),
        "mean_3x3": lambda: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
        "conv_1x1": lambda: nn.Sequential(
            *_relu_conv(channels, channels, norm, stride=(stride, stride))
        ),
        "conv_3x3": lambda: _bottleneck(
            channels, norm, _relu_conv(quarter, quarter, norm, (3, 3), (stride, stride))
        ),
        "conv_1x7_7x1": lambda: _bottleneck(
            channels,
            norm,
            _relu_conv(quarter, quarter, norm, (1, 7), (1, stride)),
            _relu_conv(quarter, quarter, norm, (7, 1), (stride, 1)),
        ),
    }
    return make[name]()


class Halve(nn.Module):
    """Halve height and width without losing every other pixel: two 1x1 convolutions, one shifted.

    [N, inside, H, W] -> [N, outside, ceil(H / 2), ceil(W / 2)].
    """

    def __init__(self, inside: int, outside: int, norm: MakeNorm) -> None:
        super().__init__()
        half = outside // 2
        self.even = nn.Conv2d(inside, half, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inside, outside - half, 1, stride=2, bias=False)
        self.norm = norm(outside)

    def forward(self, x: Tensor) -> Tensor:
        """Join the even pixels' convolution and the odd pixels' one, then normalise."""
        x = torch.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))  # type: ignore[no-any-return]


class AmoebaNetCell(nn.Module):
    """(output of the last cell, of the cell before) -> (own output, output of the last cell).

    `inputs` are the channels of the two; `channels` those of every state; `halves` says whether
    this cell halves the image, `halved` whether the last one did.
    """

    def __init__(
        self, inputs: tuple[int, int], channels: int, norm: MakeNorm, *, halves: bool, halved: bool
    ) -> None:
        super().__init__()
        last, before = inputs
        genes = REDUCTION if halves else NORMAL
        self.reads = [read for read, _ in genes]
        self.concat = REDUCTION_CONCAT if halves else NORMAL_CONCAT
        self.project_last = nn.Sequential(*_relu_conv(last, channels, norm))
        self.project_before: nn.Module = nn.Identity()
        if halved:
            self.project_before = Halve(before, channels, norm)
        elif before != channels:
            self.project_before = nn.Sequential(*_relu_conv(before, channels, norm))
        self.operations = nn.ModuleList(
            _operation(name, channels, 2 if halves and read < 2 else 1, norm)
            for read, name in genes
        )

    def forward(self, last: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the five sums in order, each of two operations on earlier states."""
        states = [self.project_last(last), self.project_before(before)]
        done = [(read, op) for read, op in zip(self.reads, self.operations, strict=True)]
        for (read_a, op_a), (read_b, op_b) in zip(done[::2], done[1::2], strict=True):
            states.append(op_a(states[read_a]) + op_b(states[read_b]))
        return torch.cat([states[index] for index in self.concat], dim=1), last


class AmoebaNetD(nn.Module):
    """AmoebaNet-D (`layers`, `filters`): [N, in_channels, H, W] -> logits [N, num_classes].

    `layers` normal cells in three equal stages, a reduction cell between stages; a stem of one
    convolution and two reduction cells before them divides height and width by 8.

    Raises:
        ModelError: when `layers` is no positive multiple of 3, or `filters` is below 16.

    Source: Huang et al. 2018, section 4 and Table 1, for the meaning of (L, D).
    """

    def __init__(
        self,
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        layers: int = 6,
        filters: int = 190,
        norm: str = "group",
    ) -> None:
        super().__init__()
        if layers < 3 or layers % 3 or filters < 16:
            raise ModelError(
                "AmoebaNet-D needs layers that are a multiple of 3 and at least 16 filters; "
                f"got {layers} layers, {filters} filters. Try amoebanet-d:6,190."
            )
        make = functools.partial(make_norm, norm)
        channels = filters // 4
        stem = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False)
        self.stem = nn.Sequential(stem, make(channels))
        stage = [False] * (layers // 3)
        self.cells = nn.ModuleList()
        last = before = channels
        halved = False
        for halves in [True, True, *stage, True, *stage, True, *stage]:
            channels *= 2 if halves else 1
            cell = AmoebaNetCell((last, before), channels, make, halves=halves, halved=halved)
            self.cells.append(cell)
            last, before, halved = channels * len(cell.concat), last, halves
        self.head = nn.Linear(last, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Pass the image through the stem and the cells, average each channel, classify."""
        last = before = self.stem(x)
        for cell in self.cells:
            last, before = cell(last, before)
        return self.head(last.mean(dim=(2, 3)))  # type: ignore[no-any-return]
