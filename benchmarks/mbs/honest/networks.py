"""Networks written here: the usual blocks of vision, language, sequences and graphs, made small."""

import copy
import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from anybatch.cli.metrics import bce_dice
from anybatch.cli.models.amoebanet import AmoebaNetD
from anybatch.cli.models.resnet import resnet20
from anybatch.cli.models.small import cnn
from anybatch.cli.models.unet import UNet
from benchmarks.mbs import models as mbs
from benchmarks.mbs.honest.subjects import (
    ROWS,
    Problem,
    classes,
    rows,
    squared,
    subject,
    tokens,
    values,
)
from benchmarks.mbs.prediction.models import densenet

D, T, V, C = 8, 5, 11, 3
"""Width, length, vocabulary, classes."""

Body = Callable[..., Any]


class Net(nn.Module):
    """Layers by name, and what forward does with them."""

    def __init__(self, body: Body, **layers: Any) -> None:
        super().__init__()
        self.body = body
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Any) -> Any:
        """Whatever the body returns."""
        return self.body(self, *inputs)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 2)


def linear(inside: int = D, outside: int = D) -> nn.Linear:
    return nn.Linear(inside, outside)


def conv(inside: int = 3, outside: int = D, kernel: int = 3, **more: Any) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, kernel, padding=kernel // 2, **more)


def pooled(channels: int = D) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, C)]


def images(side: int = 8) -> Tensor:
    return rows(3, side, side)


def words(length: int = T) -> Tensor:
    return torch.randint(V, (ROWS, length))


def simple(
    name: str, group: str, make: Callable[[], nn.Module], side: int = 8, **more: Any
) -> None:
    """Register a classifier of images."""
    subject(name, group, **more)(lambda: classes(make(), images(side)))


# --- ours
for _norm in ("batch", "group"):
    simple(f"ResNet-20, {_norm}", "ours", partial(resnet20, num_classes=C, norm=_norm))
    subject(f"U-Net, {_norm}", "ours")(
        lambda n=_norm: Problem(
            UNet(width=2, norm=n),
            images(16),
            (torch.rand(ROWS, 1, 16, 16) > 0.6).double(),
            bce_dice,
        )
    )
simple("AmoebaNet-D", "ours", lambda: AmoebaNetD(num_classes=C, layers=3, filters=16), 16)
simple("small CNN", "ours", lambda: cnn(num_classes=C, in_channels=3, width=8))
simple("ResNet of the benchmarks", "ours", lambda: mbs.ResNet(C, width=4, blocks=(1, 1)))
simple("DenseNet", "ours", lambda: densenet((2, 2), growth=2, classes=C))
subject("MLP", "ours")(lambda: classes(mbs.MLP(6, D, C), rows(6)))
subject("LSTM of the benchmarks", "ours")(
    lambda: tokens(mbs.LSTM(V, width=D, outputs=V), words(), T, V)
)
for _tied in (False, True):
    subject(f"TransformerLM{', tied' if _tied else ''}", "ours")(
        lambda t=_tied: tokens(
            mbs.TransformerLM(V, width=D, layers=2, heads=2, length=T, tied=t), words(), T, V
        )
    )
for _name in ("ResNet-50", "Inception", "MobileNet"):

    def _of_tests(name: str = _name) -> Problem:
        network = import_module("tests.networks").NETWORKS[name]
        x, y = network.rows(ROWS)
        return Problem(network.small(), x, y, network.loss)

    subject(f"{_name} of the tests", "ours")(_of_tests)


# --- normalisation
def normed(norm: nn.Module, channels: int = D) -> nn.Module:
    return nn.Sequential(conv(), norm, nn.ReLU(), conv(D, D), nn.ReLU(), *pooled(channels))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.BatchNorm2d(D),
    "BatchNorm in eval": lambda: nn.BatchNorm2d(D).eval(),
    "BatchNorm without statistics": lambda: nn.BatchNorm2d(D, track_running_stats=False),
    "BatchNorm, momentum None": lambda: nn.BatchNorm2d(D, momentum=None),
    "GroupNorm": lambda: nn.GroupNorm(2, D),
    "InstanceNorm": lambda: nn.InstanceNorm2d(D, affine=True),
    "LayerNorm": lambda: nn.LayerNorm([D, 8, 8]),
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(3),
}
for _name, _make in NORMS.items():
    simple(_name, "normalisation", lambda m=_make: normed(m()))  # type: ignore[misc]
simple("weight norm", "normalisation", lambda: nn.Sequential(
    parametrizations.weight_norm(conv()), nn.ReLU(), *pooled()))  # fmt: skip
simple("spectral norm in eval", "normalisation", lambda: nn.Sequential(
    parametrizations.spectral_norm(conv()), nn.ReLU(), *pooled()).eval())  # fmt: skip
simple("orthogonal parametrisation", "normalisation", lambda: nn.Sequential(
    nn.Flatten(), nn.Linear(192, D), parametrizations.orthogonal(linear()), linear(D, C),
))  # fmt: skip


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def _symmetric() -> nn.Module:
    layer = linear()
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return nn.Sequential(nn.Flatten(), nn.Linear(192, D), layer, nn.Tanh(), linear(D, C))


simple("symmetric parametrisation", "normalisation", _symmetric)


@subject("weight standardisation", "normalisation")
def _standardised() -> Problem:
    def body(m: Any, x: Tensor) -> Tensor:
        w = m.conv.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        found: Tensor = m.head(F.conv2d(x, w, padding=1).relu())
        return found

    return classes(Net(body, conv=conv(), head=nn.Sequential(*pooled())), images())


@subject("RMSNorm and DyT", "normalisation")
def _rms() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        return m.head(torch.tanh(m.scale * m.norm(m.stem(x))))

    net = Net(body, stem=linear(6), norm=nn.RMSNorm(D), scale=parameter(D), head=linear(D, C))
    return classes(net, rows(6))


# --- vision
class Residual(nn.Module):
    """x + body(x)."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] -> the same shape."""
        found: Tensor = x + self.body(x)
        return found


class Swap(nn.Module):
    """Two dimensions exchanged."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.dims = a, b

    def forward(self, x: Tensor) -> Tensor:
        """[n, ...] -> transposed."""
        return x.transpose(*self.dims)


simple("ResNeXt", "vision", lambda: nn.Sequential(
    conv(), Residual(conv(D, D, 1), nn.BatchNorm2d(D), nn.ReLU(), conv(D, D, groups=4),
                     nn.BatchNorm2d(D), nn.ReLU(), conv(D, D, 1)), *pooled()))  # fmt: skip
simple("VGG", "vision", lambda: nn.Sequential(
    conv(), nn.ReLU(), nn.MaxPool2d(2), conv(D, D), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(4 * D, D), nn.ReLU(), linear(D, C)))  # fmt: skip
simple("VGG with dropout", "vision", lambda: nn.Sequential(
    conv(), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten(), nn.Dropout(), nn.Linear(64 * D, C)),
    rng="batch")  # fmt: skip
simple("MLP-Mixer", "vision", lambda: nn.Sequential(
    nn.Conv2d(3, D, 2, 2), nn.Flatten(2), Swap(1, 2),
    Residual(nn.LayerNorm(D), Swap(1, 2), nn.Linear(16, 16), nn.GELU(), Swap(1, 2)),
    Residual(nn.LayerNorm(D), linear(), nn.GELU(), linear()),
    Swap(1, 2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), linear(D, C)))  # fmt: skip
simple("ConvMixer", "vision", lambda: nn.Sequential(
    nn.Conv2d(3, D, 2, 2), nn.GELU(), nn.BatchNorm2d(D),
    Residual(conv(D, D, groups=D), nn.GELU(), nn.BatchNorm2d(D)), conv(D, D, 1), *pooled(),
))  # fmt: skip
simple("all convolutions, dilated", "vision", lambda: nn.Sequential(
    nn.Conv2d(3, D, 3, padding=2, dilation=2), nn.ELU(), nn.Conv2d(D, D, 3, 2), nn.SiLU(),
    nn.PixelUnshuffle(3), *pooled(9 * D)))  # fmt: skip


@subject("ConvNeXt", "vision")
def _convnext() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        x = m.stem(x)
        y = m.norm(m.depth(x).movedim(1, -1))
        x = x + (m.gamma * m.out(F.gelu(m.wide(y)))).movedim(-1, 1)
        return m.head(x)

    net = Net(
        body,
        stem=nn.Conv2d(3, D, 2, 2),
        depth=conv(D, D, 7, groups=D),
        norm=nn.LayerNorm(D),
        wide=linear(D, 4 * D),
        out=linear(4 * D, D),
        gamma=nn.Parameter(torch.full((D,), 1e-6)),
        head=nn.Sequential(*pooled()),
    )
    return classes(net, images())


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int = 2, **more: Any) -> Tensor:
    """Heads of attention over [n, t, d]."""
    q, k, v = (x.view(*x.shape[:2], heads, -1).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **more).transpose(1, 2).flatten(2)


@subject("ViT", "vision")
def _vit() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        x = m.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.place
        q, k, v = m.qkv(m.norm(x)).chunk(3, -1)
        x = x + m.out(attend(q, k, v))
        return m.head(x[:, 0])

    net = Net(
        body,
        patch=nn.Conv2d(3, D, 4, 4),
        token=parameter(1, 1, D),
        place=parameter(1, 5, D),
        norm=nn.LayerNorm(D),
        qkv=linear(D, 3 * D),
        out=linear(),
        head=linear(D, C),
    )
    return classes(net, images())


@subject("Swin, windows rolled over space", "vision")
def _swin() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        x = m.patch(x).movedim(1, -1)  # n, 4, 4, d
        n = len(x)
        rolled = x.roll((-1, -1), (1, 2))
        windows = rolled.view(n, 2, 2, 2, 2, D).transpose(2, 3).reshape(4 * n, 4, D)
        q, k, v = m.qkv(m.norm(windows)).chunk(3, -1)
        found = m.out(attend(q, k, v, attn_mask=m.bias))
        back = found.view(n, 2, 2, 2, 2, D).transpose(2, 3).reshape(n, 4, 4, D)
        return m.head((x + back.roll((1, 1), (1, 2))).movedim(-1, 1))

    net = Net(
        body,
        patch=nn.Conv2d(3, D, 2, 2),
        norm=nn.LayerNorm(D),
        qkv=linear(D, 3 * D),
        bias=parameter(4, 4),
        out=linear(),
        head=nn.Sequential(*pooled()),
    )
    return classes(net, images())


@subject("squeeze and excite", "vision")
def _squeeze() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        x = m.stem(x)
        return m.head(x * m.gate(x.mean((2, 3)))[..., None, None].sigmoid())

    gate = nn.Sequential(linear(D, 2), nn.ReLU(), linear(2, D))
    return classes(Net(body, stem=conv(), gate=gate, head=nn.Sequential(*pooled())), images())


@subject("spatial transformer", "vision")
def _transformer_of_space() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        theta = m.base + 0.1 * m.where(x.flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return m.head(m.stem(F.grid_sample(x, grid, align_corners=False)))

    net = Net(
        body,
        where=nn.Linear(192, 6),
        base=nn.Parameter(torch.eye(2, 3)),
        stem=conv(),
        head=nn.Sequential(*pooled()),
    )
    return classes(net, images())


@subject("deformable convolution by grid_sample", "vision")
def _deformable() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        x = m.stem(x)
        shift = 0.1 * m.offset(x).movedim(1, -1)
        eye = torch.eye(2, 3, dtype=x.dtype, device=x.device).expand(len(x), 2, 3)
        grid = F.affine_grid(eye, list(x.shape), align_corners=True) + shift
        return m.head(F.grid_sample(x, grid, padding_mode="border", align_corners=True))

    return classes(
        Net(body, stem=conv(), offset=conv(D, 2), head=nn.Sequential(*pooled())), images()
    )


@subject("unfold and fold", "vision")
def _unfolded() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        patches = F.unfold(m.stem(x), 2, stride=2)
        return m.head(F.fold(m.mix(patches.transpose(1, 2)).transpose(1, 2), (8, 8), 2, stride=2))

    net = Net(body, stem=conv(), mix=linear(4 * D, 4 * D), head=nn.Sequential(nn.ReLU(), *pooled()))
    return classes(net, images())


@subject("detection head, static", "vision")
def _detector() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        small = m.stem(x).relu()
        large = F.interpolate(m.down(small), scale_factor=2) + small
        return m.classes(large), m.boxes(large)

    def loss(outputs: Any, targets: Any) -> Tensor:
        scores, boxes = outputs
        labels, where = targets
        return F.cross_entropy(scores, labels, ignore_index=-1) + F.smooth_l1_loss(boxes, where)

    labels = torch.randint(-1, C, (ROWS, 8, 8))
    net = Net(body, stem=conv(), down=nn.Conv2d(D, D, 2, 2), classes=conv(D, C), boxes=conv(D, 4))
    return Problem(net, images(), (labels, torch.randn(ROWS, 4, 8, 8)), loss)


@subject("segmentation with dice", "vision")
def _segmentation() -> Problem:
    def dice(out: Tensor, y: Tensor) -> Tensor:
        p = out.sigmoid()
        return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)

    y = (torch.rand(ROWS, 1, 8, 8) > 0.5).double()
    return Problem(nn.Sequential(conv(), nn.ReLU(), conv(D, 1)), images(), y, dice)


@subject("autoencoder with transposed convolutions", "vision")
def _autoencoder() -> Problem:
    net = nn.Sequential(
        *(nn.Conv2d(3, D, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(D, 3, 4, 2, 1), nn.Sigmoid())
    )
    return values(net, images(), 3, 8, 8)


@subject("VAE", "vision", rng="batch")
def _vae() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        middle, log = m.encode(x).chunk(2, 1)
        return m.decode(middle + (log / 2).exp() * torch.randn_like(middle)), middle, log

    def loss(outputs: Any, x: Tensor) -> Tensor:
        found, middle, log = outputs
        far: Tensor = (middle.square() + log.exp() - 1 - log).sum(1).mean() / 2
        return F.mse_loss(found, x) + 0.1 * far

    x = rows(6)
    return Problem(Net(body, encode=linear(6, 4), decode=linear(2, 6)), x, x.clone(), loss)


@subject("VQ-VAE", "vision")
def _codebook() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        z = m.encode(x)
        code = m.codes[torch.cdist(z, m.codes).argmin(1)]
        return m.decode(z + (code - z).detach()), z, code

    def loss(outputs: Any, x: Tensor) -> Tensor:
        found, z, code = outputs
        return (
            F.mse_loss(found, x)
            + F.mse_loss(code, z.detach())
            + 0.25 * F.mse_loss(z, code.detach())
        )

    x = rows(6)
    net = Net(body, encode=linear(6, 4), codes=parameter(5, 4), decode=linear(4, 6))
    return Problem(net, x, x.clone(), loss)


@subject("diffusion step, adaLN-Zero", "vision", rng="batch")
def _diffusion() -> Problem:
    def body(m: Any, x: Tensor, t: Tensor) -> Any:
        scale, shift, gate = m.modulate(m.time(t[:, None])).chunk(3, 1)
        noisy = x + t[:, None] * torch.randn_like(x)
        h = m.stem(noisy)
        return m.out(h + gate * m.inner(m.norm(h) * (1 + scale) + shift))

    modulate = linear(D, 3 * D)
    nn.init.zeros_(modulate.weight)
    net = Net(
        body,
        time=nn.Sequential(linear(1), nn.SiLU()),
        modulate=modulate,
        stem=linear(6),
        norm=nn.LayerNorm(D, elementwise_affine=False),
        inner=nn.Sequential(linear(), nn.GELU(), linear()),
        out=linear(D, 6),
    )
    return values(net, (rows(6), torch.rand(ROWS)), 6)


@subject("stochastic depth", "vision", rng="batch")
def _drop_path() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        h = m.stem(x)
        keep = (torch.rand(len(h), 1, device=h.device) < 0.7).to(h.dtype) / 0.7
        return m.head(h + keep * m.inner(h).tanh())

    return classes(Net(body, stem=linear(6), inner=linear(), head=linear(D, C)), rows(6))


@subject("channels_last", "vision")
def _channels_last() -> Problem:
    net = nn.Sequential(conv(), nn.BatchNorm2d(D), nn.ReLU(), conv(D, D), *pooled())
    x = images().contiguous(memory_format=torch.channels_last)
    return classes(net.to(memory_format=torch.channels_last), x)  # type: ignore[call-overload]


@subject("volumes", "vision")
def _volumes() -> Problem:
    net = nn.Sequential(
        *(nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2)),
        *(nn.Flatten(), nn.Linear(32, C)),
    )
    return classes(net, rows(2, 4, 4, 4))


@subject("siamese", "vision")
def _siamese() -> Problem:
    def body(m: Any, a: Tensor, b: Tensor) -> Any:
        return (m.encode(a) - m.encode(b)).square().sum(1)

    encode = nn.Sequential(linear(6), nn.Tanh(), linear())
    return values(Net(body, encode=encode), (rows(6), rows(6)))


@subject("siamese with BatchNorm", "vision")
def _siamese_normed() -> Problem:
    def body(m: Any, a: Tensor, b: Tensor) -> Any:
        return F.cosine_similarity(m.encode(a), m.encode(b))

    encode = nn.Sequential(linear(6), nn.BatchNorm1d(D), nn.Tanh(), linear())
    return values(Net(body, encode=encode), (rows(6), rows(6)))


@subject("hypernetwork", "vision")
def _hyper() -> Problem:
    def body(m: Any, x: Tensor, c: Tensor) -> Any:
        w = m.make(c).view(-1, C, 6)
        return torch.bmm(w, x[:, :, None])[..., 0]

    return classes(Net(body, make=linear(4, 6 * C)), (rows(6), rows(4)))


@subject("FiLM over space", "vision")
def _film() -> Problem:
    def body(m: Any, x: Tensor, c: Tensor) -> Any:
        scale, shift = m.film(c)[..., None, None].chunk(2, 1)
        return m.head(m.stem(x) * scale + shift)

    net = Net(body, stem=conv(), film=linear(4, 2 * D), head=nn.Sequential(*pooled()))
    return classes(net, (images(), rows(4)))


@subject("Fourier layer", "vision")
def _fourier() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        x = m.stem(x)
        waves = torch.fft.rfft2(x)
        mixed = torch.einsum("nchw,cd->ndhw", waves, torch.complex(m.real, m.imag))
        return m.head(torch.fft.irfft2(mixed, s=x.shape[-2:]) + x)

    net = Net(
        body,
        stem=conv(),
        real=parameter(D, D),
        imag=parameter(D, D),
        head=nn.Sequential(nn.GELU(), *pooled()),
    )
    return classes(net, images())


# --- language
@subject("embedding bag", "language")
def _bag() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        return m.head(m.bag(x))

    return classes(Net(body, bag=nn.EmbeddingBag(V, D), head=linear(D, C)), words())


@subject("embeddings with padding_idx", "language")
def _padded() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        mask = (x != 0)[..., None].to(m.head.weight.dtype)
        return m.head((m.embed(x) * mask).sum(1) / mask.sum(1).clamp(min=1))

    return classes(Net(body, embed=nn.Embedding(V, D, padding_idx=0), head=linear(D, C)), words())


def _masks() -> Tensor:
    lengths = torch.tensor([5, 3, 1, 4, 2, 5, 3])
    return torch.arange(T)[None] < lengths[:, None]


def _attention(body: Body, *more: Tensor, **layers: Any) -> Problem:
    net = Net(body, embed=nn.Embedding(V, D), qkv=linear(D, 3 * D), out=linear(D, V), **layers)
    return tokens(net, (words(), *more), T, V)


@subject("attention with a causal mask of -inf", "language")
def _causal() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        q, k, v = m.qkv(m.embed(x)).chunk(3, -1)
        return m.out(attend(q, k, v, attn_mask=m.mask))

    mask = torch.full((T, T), -math.inf).triu(1)
    problem = _attention(body)
    problem.model.register_buffer("mask", mask)
    return problem


@subject("attention with padding masks", "language")
def _padding() -> Problem:
    def body(m: Any, x: Tensor, keep: Tensor) -> Any:
        q, k, v = m.qkv(m.embed(x)).chunk(3, -1)
        return m.out(attend(q, k, v, attn_mask=keep[:, None, None]))

    return _attention(body, _masks())


@subject("attention, is_causal and grouped", "language")
def _grouped() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        x = m.embed(x)
        q = m.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = (w(x).unflatten(-1, (2, -1)).transpose(1, 2) for w in (m.k, m.v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return m.out(found.transpose(1, 2).flatten(2))

    return _attention(body, q=linear(), k=linear(D, 4), v=linear(D, 4))


@subject("attention with dropout", "language", rng="batch")
def _dropping() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        q, k, v = m.qkv(m.embed(x)).chunk(3, -1)
        weight = F.dropout((q @ k.transpose(1, 2)).softmax(-1), 0.3)
        return m.out(weight @ v)

    return _attention(body)


@subject("rotary positions", "language")
def _rotary() -> Problem:
    def rotate(x: Tensor) -> Tensor:
        like: Any = {"dtype": x.dtype, "device": x.device}
        angle = torch.arange(T, **like)[:, None] / 10 ** torch.arange(D // 2, **like)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def body(m: Any, x: Tensor) -> Any:
        q, k, v = m.qkv(m.embed(x)).chunk(3, -1)
        return m.out(attend(rotate(q), rotate(k), v, is_causal=True))

    return _attention(body)


@subject("relative position bias", "language")
def _relative() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        at = torch.arange(T, device=x.device)
        bias = m.bias[(at[:, None] - at[None]) + T - 1].movedim(-1, 0)
        q, k, v = m.qkv(m.embed(x)).chunk(3, -1)
        return m.out(attend(q, k, v, attn_mask=bias))

    return _attention(body, bias=parameter(2 * T - 1, 2))


@subject("linear attention", "language")
def _linear_attention() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        q, k, v = m.qkv(m.embed(x)).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("ntd,nte->ntde", k, v).cumsum(1)
        return m.out(torch.einsum("ntd,ntde->nte", q, state))

    return _attention(body)


@subject("state-space scan", "language")
def _scan() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        x = m.embed(x)
        state, found = torch.zeros_like(x[:, 0]), []
        for t in range(T):
            state = m.decay.sigmoid() * state + x[:, t]
            found.append(state)
        return m.out(torch.stack(found, 1))

    return _attention(body, decay=parameter(D))


@subject("mixture of experts, top 2 of each token", "language")
def _experts() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        x = m.embed(x)
        weight, choice = m.router(x).softmax(-1).topk(2, -1)
        every = torch.stack([expert(x) for expert in m.experts], -2)
        chosen = every.gather(-2, choice[..., None].expand(*choice.shape, D))
        return m.out((weight[..., None] * chosen).sum(-2))

    experts = nn.ModuleList(linear() for _ in range(4))
    return _attention(body, router=linear(D, 4), experts=experts)


@subject("mixture of experts, tokens gathered by mask", "language")
def _masked_experts() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        flat = m.embed(x).flatten(0, 1)
        weight, choice = m.router(flat).softmax(-1).max(-1)
        found = torch.zeros_like(flat)
        for i, expert in enumerate(m.experts):
            at = (choice == i).nonzero()[:, 0]
            found = found.index_add(0, at, expert(flat[at]) * weight[at, None])
        return m.out(found.view(*x.shape, D))

    experts = nn.ModuleList(linear() for _ in range(2))
    return _attention(body, router=linear(D, 2), experts=experts)


@subject("gumbel softmax", "language", rng="batch")
def _gumbel() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        return m.out(F.gumbel_softmax(m.head(m.embed(x)), hard=True) @ m.codes)

    return _attention(body, head=linear(D, 4), codes=parameter(4, D))


@subject("sequence loss by CTC", "language")
def _ctc() -> Problem:
    def loss(out: Tensor, targets: Any) -> Tensor:
        labels, lengths = targets
        size = torch.full((len(out),), T, dtype=torch.long)
        return F.ctc_loss(out.log_softmax(-1).transpose(0, 1), labels, size, lengths)

    labels = torch.randint(1, V, (ROWS, 2))
    net = nn.Sequential(nn.Embedding(V, D), linear(), nn.Tanh(), linear(D, V))
    return Problem(net, words(), (labels, torch.randint(1, 3, (ROWS,))), loss)


@subject("nn.Transformer", "language")
def _transformer() -> Problem:
    def body(m: Any, x: Tensor, y: Tensor, keep: Tensor) -> Any:
        like: Any = {"dtype": m.out.weight.dtype, "device": keep.device}
        mask = nn.Transformer.generate_square_subsequent_mask(T, **like)
        hidden = torch.zeros(keep.shape, **like).masked_fill(~keep, -math.inf)
        found = m.both(m.embed(x), m.embed(y), tgt_mask=mask, src_key_padding_mask=hidden)
        return m.out(found)

    both = nn.Transformer(D, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    return _attention(body, words(), _masks(), both=both)


# --- sequences
def recurrent(make: Any, **more: Any) -> Body:
    def problem() -> Problem:
        def body(m: Any, x: Tensor) -> Any:
            return m.head(m.rnn(m.embed(x))[0])

        rnn = make(D, D, batch_first=True, **more)
        width = D * (2 if more.get("bidirectional") else 1)
        net = Net(body, embed=nn.Embedding(V, D), rnn=rnn, head=linear(width, V))
        return tokens(net, words(), T, V)

    return problem


for _name, _rnn in {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}.items():
    subject(_name, "sequences")(recurrent(_rnn))
    subject(f"{_name}, two layers, both ways", "sequences")(
        recurrent(_rnn, num_layers=2, bidirectional=True)
    )
subject("LSTM without biases", "sequences")(recurrent(nn.LSTM, bias=False))
subject("GRU with dropout", "sequences", rng="batch")(recurrent(nn.GRU, num_layers=2, dropout=0.4))


def packed(make: Any, *, total: bool) -> Body:
    def problem() -> Problem:
        def body(m: Any, x: Tensor, keep: Tensor) -> Any:
            inside = pack_padded_sequence(
                m.embed(x), keep.sum(1).cpu(), batch_first=True, enforce_sorted=False
            )
            found, last = m.rnn(inside)
            if not total:
                return m.head((last[0] if isinstance(last, tuple) else last)[-1])
            return m.head(pad_packed_sequence(found, batch_first=True, total_length=T)[0])

        net = Net(
            body, embed=nn.Embedding(V, D), rnn=make(D, D, batch_first=True), head=linear(D, V)
        )
        inputs = (words(), _masks())
        return tokens(net, inputs, T, V) if total else classes(net, inputs, V)

    return problem


for _name, _rnn in {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}.items():
    subject(f"{_name}, packed, total_length", "sequences")(packed(_rnn, total=True))
    subject(f"{_name}, packed, last state", "sequences")(packed(_rnn, total=False))


@subject("cells in a loop", "sequences")
def _cells() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        state = x.new_zeros(len(x), D)
        for t in range(x.shape[1]):
            state = m.cell(x[:, t], state)
        return m.head(state)

    return classes(Net(body, cell=nn.GRUCell(6, D), head=linear(D, C)), rows(T, 6))


@subject("temporal convolutions, causal", "sequences")
def _temporal() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        x = m.one(F.pad(x, (2, 0))).relu()
        return m.head(m.two(F.pad(x, (4, 0))).relu().mean(2))

    one, two = nn.Conv1d(6, D, 3), nn.Conv1d(D, D, 3, dilation=2)
    return classes(Net(body, one=one, two=two, head=linear(D, C)), rows(6, T))


@subject("encoder and decoder with attention", "sequences")
def _seq2seq() -> Problem:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        memory, state = m.encode(m.embed(x))
        found, _ = m.decode(m.embed(y), state)
        found = found + (found @ memory.transpose(1, 2)).softmax(-1) @ memory
        return m.out(found)

    encode, decode = (nn.GRU(D, D, batch_first=True) for _ in range(2))
    return _attention(body, words(), encode=encode, decode=decode)


# --- graphs, sets, tables
@subject("graph network, dense", "other")
def _graph() -> Problem:
    def body(m: Any, x: Tensor, edges: Tensor) -> Any:
        near = edges / edges.sum(-1, keepdim=True).clamp(min=1)
        x = m.one(near @ x).relu()
        return m.head(m.two(near @ x).relu().amax(1))

    edges = (torch.rand(ROWS, 4, 4) > 0.5).double()
    net = Net(body, one=linear(6), two=linear(), head=linear(D, C))
    return classes(net, (rows(4, 6), edges))


@subject("set network", "other")
def _set() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        return m.head(m.each(x).sum(1))

    each = nn.Sequential(linear(6), nn.ReLU(), linear())
    return classes(Net(body, each=each, head=linear(D, C)), rows(4, 6))


@subject("PointNet", "other")
def _points() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        return m.head(m.each(x.transpose(1, 2)).amax(2))

    each = nn.Sequential(nn.Conv1d(3, D, 1), nn.BatchNorm1d(D), nn.ReLU(), nn.Conv1d(D, D, 1))
    return classes(Net(body, each=each, head=linear(D, C)), rows(9, 3))


@subject("factorisation machine", "other")
def _factors() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        e = m.embed(x)
        return (e.sum(1).square() - e.square().sum(1)).sum(1) + m.bias(x).sum((1, 2))

    return values(Net(body, embed=nn.Embedding(V, D), bias=nn.Embedding(V, 1)), words())


@subject("einsum, bilinear", "other")
def _einsum() -> Problem:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        return torch.einsum("ni,kij,nj->nk", x, m.w, y) + m.both(x, y)

    net = Net(body, w=parameter(C, 6, 4), both=nn.Bilinear(6, 4, C))
    return classes(net, (rows(6), rows(4)))


@subject("Gaussian with a learnt variance", "other")
def _gaussian() -> Problem:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.gaussian_nll_loss(out[:, :1], y, F.softplus(out[:, 1:]) + 0.1)

    net = nn.Sequential(linear(6), nn.Tanh(), linear(D, 2))
    return Problem(net, rows(6), torch.randn(ROWS, 1), loss)


@subject("linear algebra of each sample", "other")
def _algebra() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        a = m.make(x).view(-1, 3, 3)
        a = a @ a.transpose(1, 2) + torch.eye(3, dtype=x.dtype, device=x.device)
        return torch.linalg.solve(a, m.rhs.expand(len(x), 3)) + torch.logdet(a)[:, None]

    return classes(Net(body, make=linear(6, 9), rhs=parameter(3)), rows(6))


@subject("neural ODE, fixed steps", "other")
def _ode() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        h = m.stem(x)
        for _ in range(4):
            middle = h + 0.125 * m.field(h).tanh()
            h = h + 0.25 * m.field(middle).tanh()
        return m.head(h)

    return classes(Net(body, stem=linear(6), field=linear(), head=linear(D, C)), rows(6))


@subject("class weights and label smoothing", "other")
def _weighted() -> Problem:
    weight = torch.tensor([0.2, 1.0, 3.0])

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, weight=weight.to(out), label_smoothing=0.1)

    net = nn.Sequential(linear(6), nn.PReLU(), linear(D, C))
    return Problem(net, rows(6), torch.randint(C, (ROWS,)), loss)


@subject("contrastive pairs", "other")
def _pairs() -> Problem:
    def body(m: Any, a: Tensor, b: Tensor) -> Any:
        return F.normalize(m.one(a)), F.normalize(m.two(b))

    def loss(outputs: Any) -> Tensor:
        logits = outputs[0] @ outputs[1].T / 0.5
        return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))

    return Problem(Net(body, one=linear(6), two=linear(6)), (rows(6), rows(6)), None, loss)


# --- how it is trained
@subject("checkpointed blocks", "ways")
def _checkpointed() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        return m.head(checkpoint(m.block, m.stem(x), use_reentrant=False))

    block = nn.Sequential(linear(), nn.Tanh(), linear())
    return classes(Net(body, stem=linear(6), block=block, head=linear(D, C)), rows(6))


@subject("checkpointed blocks with BatchNorm", "ways")
def _checkpointed_norm() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        return m.head(checkpoint(m.block, m.stem(x), use_reentrant=False))

    # torch itself moves running statistics again where it computes again
    norm = nn.BatchNorm1d(D, track_running_stats=False)
    block = nn.Sequential(linear(), norm, nn.Tanh(), linear())
    return classes(Net(body, stem=linear(6), block=block, head=linear(D, C)), rows(6))


@subject("checkpoint_sequential", "ways")
def _segments() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        run: Any = checkpoint_sequential
        return m.head(run(m.blocks, 2, m.stem(x), use_reentrant=False))

    blocks = nn.Sequential(*(nn.Sequential(linear(), nn.Tanh()) for _ in range(4)))
    return classes(Net(body, stem=linear(6), blocks=blocks, head=linear(D, C)), rows(6))


@subject("weights tied across layers", "ways")
def _tied_layers() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        h = m.embed(x)
        for _ in range(3):
            h = h + m.layer(h).tanh()
        return h @ m.embed.weight.T

    return tokens(Net(body, embed=nn.Embedding(V, D), layer=linear()), words(), T, V)


@subject("frozen backbone in eval", "ways")
def _frozen() -> Problem:
    backbone = nn.Sequential(conv(), nn.BatchNorm2d(D), nn.ReLU()).eval().requires_grad_(False)
    return classes(nn.Sequential(backbone, *pooled()), images())


@subject("frozen backbone under no_grad", "ways")
def _no_grad() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        with torch.no_grad():
            h = m.backbone(x)
        return m.head(h)

    backbone = nn.Sequential(conv(), nn.ReLU()).requires_grad_(False)
    return classes(Net(body, backbone=backbone, head=nn.Sequential(*pooled())), images())


@subject("LoRA", "ways")
def _lora() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        return m.head(m.base(x) + x @ m.down @ m.up)

    net = Net(
        body,
        base=linear(6).requires_grad_(False),
        down=parameter(6, 2),
        up=nn.Parameter(torch.zeros(2, D)),
        head=linear(D, C),
    )
    return classes(net, rows(6))


@subject("teacher and student", "ways")
def _distilled() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        with torch.no_grad():
            soft = m.teacher(x).log_softmax(1)
        return m.student(x).log_softmax(1), soft

    def loss(outputs: Any) -> Tensor:
        return F.kl_div(outputs[0], outputs[1], reduction="batchmean", log_target=True)

    net = Net(body, teacher=linear(6, C).requires_grad_(False), student=linear(6, C))
    return Problem(net, rows(6), None, loss)


@subject("gradient reversal", "ways")
def _reversed() -> Problem:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(_: Any, *grads: Any) -> Any:
            return -0.5 * grads[0]

    reverse: Any = Reverse.apply

    def body(m: Any, x: Tensor) -> Any:
        h = m.stem(x).tanh()
        return m.head(h) + m.domain(reverse(h))

    return classes(Net(body, stem=linear(6), head=linear(D, C), domain=linear(D, C)), rows(6))


@subject("binary weights, straight through", "ways")
def _binary() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        w = m.stem.weight
        return m.head(F.linear(x, w + (w.sign() - w).detach()).tanh())

    return classes(Net(body, stem=linear(6), head=linear(D, C)), rows(6))


@subject("ensemble by vmap", "ways")
def _ensemble() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        return torch.func.vmap(lambda w: x @ w)(m.w).mean(0)

    return classes(Net(body, w=parameter(4, 6, C)), rows(6))


@subject("early exits in a mapping", "ways")
def _exits() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        h = m.stem(x).tanh()
        return {"early": m.one(h), "late": [m.two(m.inner(h).tanh())]}

    def loss(outputs: Any, y: Tensor) -> Tensor:
        early: Tensor = F.cross_entropy(outputs["early"], y)
        return 0.3 * early + F.cross_entropy(outputs["late"][0], y)

    net = Net(body, stem=linear(6), inner=linear(), one=linear(D, C), two=linear(D, C))
    return Problem(net, rows(6), torch.randint(C, (ROWS,)), loss)


@subject("triangular cache in a buffer", "ways")
def _buffered() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        return m.head(torch.einsum("ntd,ts->nsd", m.stem(x), m.mask).mean(1))

    net = Net(body, stem=linear(6), head=linear(D, C))
    net.register_buffer("mask", torch.ones(T, T).tril())
    return classes(net, rows(T, 6))


@subject("in-place activations and sums", "ways")
def _inplace() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        h = m.stem(x)
        h += 1
        return m.head(F.relu_(h))

    return classes(Net(body, stem=linear(6), head=linear(D, C)), rows(6))


@subject("complex weights", "ways")
def _complex() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        return (x.to(m.w.dtype) @ m.w).abs()

    w = nn.Parameter(torch.randn(6, C, dtype=torch.complex128))
    return values(Net(body, w=w), rows(6), C)


@subject("compressed loss of the mean square", "ways")
def _squares() -> Problem:
    return squared(nn.Sequential(linear(6), nn.Tanh(), copy.deepcopy(linear())), rows(6))


# --- half precision
HALF: dict[str, Any] = {"dtype": torch.bfloat16}
simple("bfloat16: convolutions, GroupNorm", "bfloat16", lambda: normed(nn.GroupNorm(2, D)), **HALF)
simple("bfloat16: BatchNorm", "bfloat16", lambda: normed(nn.BatchNorm2d(D)), **HALF)
subject("bfloat16: TransformerLM", "bfloat16", **HALF)(
    lambda: tokens(mbs.TransformerLM(V, width=D, layers=1, heads=2, length=T), words(), T, V)
)
subject("bfloat16: LSTM", "bfloat16", **HALF)(recurrent(nn.LSTM))
subject("bfloat16: MLP", "bfloat16", **HALF)(lambda: classes(mbs.MLP(6, D, C), rows(6)))
