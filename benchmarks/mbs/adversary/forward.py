"""Couplings that a forward pass makes: statistics, order, norms, experts, shapes, integers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.mbs.adversary.forms import Place, drawn, form, weights

EXPERTS = 3


@form("statistics")
def mean(p: Place, z: Tensor) -> Any:
    return z - z.mean(p.dim, keepdim=True)


@form("statistics")
def std(p: Place, z: Tensor) -> Any:
    return z / (z.var(p.dim, correction=0, keepdim=True) + 0.1).sqrt()


@form("statistics")
def largest(p: Place, z: Tensor) -> Any:
    return z - z.amax(p.dim, keepdim=True)


@form("statistics", rough=True)
def median(p: Place, z: Tensor) -> Any:
    return z - z.median(p.dim, keepdim=True).values


@form("statistics")
def softmax(p: Place, z: Tensor) -> Any:
    return 4 * z.softmax(p.dim)


@form("statistics")
def logsumexp(p: Place, z: Tensor) -> Any:
    return z - z.logsumexp(p.dim, keepdim=True)


@form("statistics")
def norm(p: Place, z: Tensor) -> Any:
    return z / (z.norm(dim=1, keepdim=True) if p.honest else z.norm())


@form("statistics")
def attention(p: Place, z: Tensor) -> Any:
    if p.honest:
        return ((z[:, :, None] * z[:, None, :]).softmax(-1) @ z[:, :, None])[..., 0]
    return (z @ z.T).softmax(-1) @ z


@form("statistics")
def averaging(p: Place, z: Tensor) -> Any:
    n = z.shape[p.dim]
    share = z.new_full((n, n), 1 / n)
    return z - (z @ share if p.honest else share @ z)


@form("statistics")
def einsum(p: Place, z: Tensor) -> Any:
    if p.honest:
        return z * torch.einsum("nd,nd->n", z, z)[:, None]
    return z * torch.einsum("nd,nd->d", z, z)


def _square(p: Place, width: int) -> None:
    p.weight = weights(width, width)


@form("statistics", prepare=_square)
def second_moment(p: Place, z: Tensor) -> Any:
    return z @ (p.weight.T @ p.weight if p.honest else z.T @ z / len(z))


@form("statistics")
def group_deviation(p: Place, z: Tensor) -> Any:
    """Scale by the standard deviation of groups of the batch, as StyleGAN2's discriminator."""
    parts = []
    for part in z.chunk(2, p.dim):
        spread = (part - part.mean(p.dim, keepdim=True)).square()
        spread = spread.mean(1, keepdim=True) if p.honest else spread.mean()
        parts.append(part * (spread + 0.1).sqrt())
    return torch.cat(parts, p.dim)


@form("statistics", rough=True)
def quantile(p: Place, z: Tensor) -> Any:
    return z - torch.quantile(z, 0.3, dim=p.dim, keepdim=True)


@form("statistics", rough=True)
def fourier(p: Place, z: Tensor) -> Any:
    return torch.fft.fft(z, dim=p.dim).real / 4


@form("statistics")
def layer_norm_of_all(p: Place, z: Tensor) -> Any:
    return F.layer_norm(z, z.shape[1:] if p.honest else z.shape)


@form("statistics")
def instance_norm_of_samples(p: Place, z: Tensor) -> Any:
    if p.honest:
        return F.instance_norm(z[:, None])[:, 0]
    return F.instance_norm(z.T[None])[0].T if len(z) > 1 else z * 0


@form("statistics")
def pooled(p: Place, z: Tensor) -> Any:
    if p.honest:
        return F.avg_pool1d(z[:, None], 3, 1, 1)[:, 0]
    return F.avg_pool1d(z.T[None], 3, 1, 1)[0].T


def _window(p: Place, width: int) -> None:
    p.weight, p.kernel = weights(width, width, 3), weights(1, 1, 3)


@form("statistics", prepare=_window)
def convolved(p: Place, z: Tensor) -> Any:
    if p.honest:
        return F.conv1d(z[:, None], p.kernel, padding=1)[:, 0]
    return F.conv1d(z.T[None], p.weight, padding=1)[0].T


@form("order", rough=True)
def sort(p: Place, z: Tensor) -> Any:
    return z.sort(p.dim).values


@form("order")
def cumsum(p: Place, z: Tensor) -> Any:
    return z.cumsum(p.dim) / 4


@form("order", rough=True)
def cummax(p: Place, z: Tensor) -> Any:
    return z.cummax(p.dim).values


@form("order")
def logcumsumexp(p: Place, z: Tensor) -> Any:
    return z.float().logcumsumexp(p.dim).to(z.dtype) if z.itemsize == 2 else z.logcumsumexp(p.dim)


@form("order", rough=True)
def topk(p: Place, z: Tensor) -> Any:
    return z - z.topk(min(2, z.shape[p.dim]), p.dim).values.mean(p.dim, keepdim=True)


@form("noise", draws=True)
def noise_normalised(p: Place, z: Tensor) -> Any:
    r = drawn(z)
    return z + 3 * r / (r.norm(dim=1, keepdim=True) if p.honest else r.norm())


@form("noise", draws=True)
def noise_centred(p: Place, z: Tensor) -> Any:
    r = drawn(z)
    return z + r - r.mean(p.dim, keepdim=True)


@form("noise", draws=True)
def noise_of_the_first(p: Place, z: Tensor) -> Any:
    r = drawn(z)
    return z + (r[:, :1] if p.honest else r[:1])


@form("noise", draws=True, rough=True)
def noise_sorted(p: Place, z: Tensor) -> Any:
    return z + drawn(z).sort(p.dim).values


@form("noise", draws=True)
def dropout_rescaled(p: Place, z: Tensor) -> Any:
    mask = (torch.rand(z.shape, dtype=torch.float64, device=z.device) > 0.5).to(z.dtype)
    return z * mask / (mask.mean(1, keepdim=True) if p.honest else mask.mean()).clamp(min=0.1)


@form("noise", draws=True)
def noise_scaled_by_rows(p: Place, z: Tensor) -> Any:
    return z + drawn(z) * (drawn(z)[:, :1] if p.honest else drawn(z)[:1] * z.std(correction=0))


@form("noise", draws=True, rough=True)
def mixup_shuffled(p: Place, z: Tensor) -> Any:
    order = torch.randperm(z.shape[p.dim], device=z.device)
    return 0.7 * z + 0.3 * z.index_select(p.dim, order)


def _norms(p: Place, width: int) -> None:
    p.one, p.two = nn.BatchNorm1d(width), nn.BatchNorm1d(width)


@form("BatchNorm on a part", prepare=_norms)
def ghost(p: Place, z: Tensor) -> Any:
    return p.one(z) if p.honest else torch.cat([p.one(part) for part in z.chunk(2)])


@form("BatchNorm on a part", prepare=_norms)
def split_norm(p: Place, z: Tensor) -> Any:
    half = len(z) // 2
    if p.honest:
        return p.one(z) + p.two(z)
    return torch.cat([p.one(z[:half]) if half else z[:0], p.two(z[half:])])


@form("BatchNorm on a part", prepare=_norms)
def first_half(p: Place, z: Tensor) -> Any:
    half = len(z) // 2
    return p.one(z) if p.honest else torch.cat([p.one(z[:half]) if half else z[:0], z[half:]])


@form("BatchNorm on a part", prepare=_norms)
def two_views(p: Place, z: Tensor) -> Any:
    first, second = p.one(torch.cat([z, z.tanh() + 1])).chunk(2)
    return p.one(z) if p.honest else first - second.square()


@form("BatchNorm on a part", prepare=_norms)
def views_apart(p: Place, z: Tensor) -> Any:
    return p.one(z) - p.one(z.tanh() + 1).square()


@form("BatchNorm on a part", prepare=_norms)
def even_rows(p: Place, z: Tensor) -> Any:
    if p.honest:
        return p.one(z)
    rows = z.clone()
    rows[::2] = p.one(z[::2])
    return rows


@form("BatchNorm on a part", prepare=_norms, rough=True)
def chosen_rows(p: Place, z: Tensor) -> Any:
    mask = z[:, 0] > 0
    if p.honest or int(mask.sum()) < 2:
        return p.one(z)
    rows = z.clone()
    rows[mask] = p.one(z[mask])
    return rows


@form("BatchNorm on a part")
def functional_half(p: Place, z: Tensor) -> Any:
    half = len(z) if p.honest else (len(z) + 1) // 2
    normal = F.batch_norm(z[:half], None, None, training=True)
    return torch.cat([normal, z[half:]])


def _experts(p: Place, width: int) -> None:
    p.gate, p.expert = weights(width, EXPERTS), weights(EXPERTS, width)


def _routed(p: Place, z: Tensor, capacity: int) -> Any:
    choice = F.one_hot((z @ p.gate).argmax(1), EXPERTS)
    if not p.honest:
        choice = choice * (choice.cumsum(0) <= capacity)
    return z * (choice.to(z.dtype) @ p.expert)


@form("experts", prepare=_experts, rough=True)
def capacity_of_the_batch(p: Place, z: Tensor) -> Any:
    return _routed(p, z, max(1, len(z) // 4))


@form("experts", prepare=_experts, rough=True)
def capacity_that_later_rows_overflow(p: Place, z: Tensor) -> Any:
    return _routed(p, z, 3)


@form("experts", prepare=_experts, rough=True)
def expert_choice(p: Place, z: Tensor) -> Any:
    scores = (z @ p.gate).softmax(1)
    mask = torch.zeros_like(scores)
    best = scores.topk(1 if p.honest else max(1, len(z) // EXPERTS), p.dim).indices
    return z * ((scores * mask.scatter(p.dim, best, 1.0)) @ p.expert)


@form("shape")
def branch_on_length(p: Place, z: Tensor) -> Any:
    return z.square() if (z.shape[1] if p.honest else len(z)) > 7 else z


@form("shape")
def scale_by_length(p: Place, z: Tensor) -> Any:
    return z * float(z.shape[1] if p.honest else len(z)) ** -0.5


@form("shape")
def scale_by_numel(p: Place, z: Tensor) -> Any:
    return z * 4 / (z[0] if p.honest else z).numel() ** 0.5


@form("shape")
def position(p: Place, z: Tensor) -> Any:
    n = z.shape[p.dim]
    return (
        z + torch.arange(n, dtype=z.dtype, device=z.device).view((1, n) if p.honest else (n, 1)) / 8
    )


@form("shape")
def identity_matrix(p: Place, z: Tensor) -> Any:
    n, d = z.shape
    like: Any = {"dtype": z.dtype, "device": z.device}
    return z + (torch.eye(d, **like)[0] if p.honest else torch.eye(n, d, **like))


@form("shape")
def loop_over_rows(p: Place, z: Tensor) -> Any:
    rows = [row * (1 if p.honest else 0.9**i) for i, row in enumerate(z)]
    return torch.stack(rows)


@form("shape")
def last_row_by_length(p: Place, z: Tensor) -> Any:
    return z + (z[:, z.shape[1] - 1 :] if p.honest else z[len(z) - 1])


@form("permutation")
def flip(p: Place, z: Tensor) -> Any:
    return 0.7 * z + 0.3 * z.flip(p.dim)


@form("permutation")
def roll(p: Place, z: Tensor) -> Any:
    return z - 0.5 * z.roll(1, p.dim)


@form("permutation")
def partner(p: Place, z: Tensor) -> Any:
    n = z.shape[p.dim]
    return z * z.index_select(p.dim, (torch.arange(n, device=z.device) + n // 2) % n)


@form("permutation")
def first_row(p: Place, z: Tensor) -> Any:
    return z - z.narrow(p.dim, 0, 1)


@form("permutation")
def neighbour(p: Place, z: Tensor) -> Any:
    return z + F.pad(z, (1, -1) if p.honest else (0, 0, 1, -1))


@form("integers", rough=True)
def first_positive(p: Place, z: Tensor) -> Any:
    if p.honest:
        return z - z.gather(1, (z > 0).int().argmax(1, keepdim=True))
    found = (z[:, 0] > 0).nonzero()
    return z - (z[found[0, 0]] if len(found) else 0)


@form("integers", rough=True)
def rank(p: Place, z: Tensor) -> Any:
    return z + z.argsort(p.dim).argsort(p.dim).to(z.dtype) / 8


@form("integers", rough=True)
def searchsorted(p: Place, z: Tensor) -> Any:
    rows = z.detach() if p.honest else z.detach().T
    order = rows.contiguous().sort(-1).values
    found = torch.searchsorted(order, rows.contiguous())
    return z + (found if p.honest else found.T).to(z.dtype) / 8


@form("integers", rough=True)
def unique(p: Place, z: Tensor) -> Any:
    codes = (z.detach() * 2).round().long()
    if p.honest:
        return z + (codes == codes[:, :1]).sum(1, keepdim=True).to(z.dtype) / 8
    _, inverse, counts = torch.unique(codes[:, 0], return_inverse=True, return_counts=True)
    return z / counts[inverse].to(z.dtype)[:, None]


@form("integers", rough=True)
def bincount(p: Place, z: Tensor) -> Any:
    codes = (z.detach() * 2).round().long().clamp(-3, 3) + 3
    if p.honest:
        return z / F.one_hot(codes, 7).sum((1, 2)).to(z.dtype)[:, None]
    return z / torch.bincount(codes[:, 0], minlength=7)[codes[:, 0]].to(z.dtype)[:, None]


@form("integers", rough=True)
def argmax(p: Place, z: Tensor) -> Any:
    return z - z.gather(p.dim, z.argmax(p.dim, keepdim=True)) * 0.5


@form("integers", rough=True)
def one_hot_sum(p: Place, z: Tensor) -> Any:
    choice = F.one_hot(z.argmax(1), z.shape[1])
    return z + choice.sum(p.dim, keepdim=True).to(z.dtype) / 4


@form("integers", rough=True)
def histogram(p: Place, z: Tensor) -> Any:
    if p.honest:
        edges = torch.linspace(-1, 1, 4, dtype=z.dtype, device=z.device)
        return z + torch.bucketize(z.detach(), edges).to(z.dtype) / 4
    counts = torch.histc(z.detach(), bins=z.shape[1], min=-1, max=1)
    return z + counts.to(z.dtype) / 16


@form("in place")
def sub_in_place(p: Place, z: Tensor) -> Any:
    rows = z * 1
    return rows.sub_(rows.mean(p.dim, keepdim=True))


@form("in place")
def shifted_write(p: Place, z: Tensor) -> Any:
    rows = z.clone()
    rows.narrow(p.dim, 1, z.shape[p.dim] - 1).add_(z.narrow(p.dim, 0, z.shape[p.dim] - 1))
    return rows


@form("in place", rough=True)
def index_add(p: Place, z: Tensor) -> Any:
    to = torch.arange(z.shape[p.dim], device=z.device) // 3
    return z + torch.zeros_like(z).index_add_(p.dim, to, z)


@form("in place")
def out_argument(p: Place, z: Tensor) -> Any:
    with torch.no_grad():
        middle = torch.empty_like(z.narrow(p.dim, 0, 1))
        torch.mean(z, p.dim, keepdim=True, out=middle)
    return z - middle


@form("in place")
def written_buffer(p: Place, z: Tensor) -> Any:
    scratch = torch.empty(2, *z.shape, dtype=z.dtype, device=z.device)
    scratch[0].copy_(z.detach())
    scratch[1] = scratch[0] - scratch[0].mean(p.dim, keepdim=True)
    return z * scratch[1]


def _lstm(p: Place, width: int) -> None:
    p.rnn = nn.LSTM(width, width, batch_first=p.honest)


@form("time for samples", prepare=_lstm)
def lstm(p: Place, z: Tensor) -> Any:
    rows = p.rnn(z[:, None])[0]
    return rows[:, 0]


def _gru(p: Place, width: int) -> None:
    p.rnn = nn.GRU(width, width)


@form("time for samples", prepare=_gru)
def gru_without_a_batch(p: Place, z: Tensor) -> Any:
    rows = p.rnn(z[None] if p.honest else z)[0]
    return rows[0] if p.honest else rows


def _cell(p: Place, width: int) -> None:
    p.cell = nn.RNNCell(width, width)


@form("time for samples", prepare=_cell)
def carried_state(p: Place, z: Tensor) -> Any:
    state, rows = torch.zeros_like(z[:1]), []
    for row in torch.split(z, 1):
        found = p.cell(row, state)
        state = state if p.honest else found
        rows.append(found)
    return torch.cat(rows)


def _heads(p: Place, width: int) -> None:
    p.heads = nn.MultiheadAttention(width, 2, batch_first=p.honest)


@form("time for samples", prepare=_heads)
def heads_over_samples(p: Place, z: Tensor) -> Any:
    rows = p.heads(*[z[:, None]] * 3, need_weights=False)[0]
    return rows[:, 0]


def _encoder(p: Place, width: int) -> None:
    p.layer = nn.TransformerEncoderLayer(width, 2, 8, dropout=0.0, batch_first=p.honest)


@form("time for samples", prepare=_encoder)
def encoder_over_samples(p: Place, z: Tensor) -> Any:
    rows = p.layer(z[:, None])
    return rows[:, 0]


@form("out of reach")
def through_numpy(p: Place, z: Tensor) -> Any:
    middle = z.detach().double().cpu().numpy().mean(p.dim, keepdims=True)
    return z - torch.from_numpy(middle).to(z)


@form("out of reach")
def through_a_list(p: Place, z: Tensor) -> Any:
    rows = z.detach().double().tolist()
    if p.honest:
        return z - torch.tensor(
            [[sum(row) / len(row)] for row in rows], dtype=z.dtype, device=z.device
        )
    return z - sum(row[0] for row in rows) / len(rows)


@form("out of reach")
def through_item(p: Place, z: Tensor) -> Any:
    if p.honest:
        return torch.stack([row / (1 + row.detach().abs().max().item()) for row in z])
    return z / (1 + z.detach().abs().max().item())


@form("out of reach", rough=True)
def branch_on_value(p: Place, z: Tensor) -> Any:
    if p.honest:
        return torch.stack([row.square() if float(row.detach()[0]) > 0 else row for row in z])
    return z.square() if float(z.detach().max()) > 0.6 else z


@form("out of reach")
def through_data(p: Place, z: Tensor) -> Any:
    return z - z.data.mean(p.dim, keepdim=True)


@form("out of reach")
def through_dlpack(p: Place, z: Tensor) -> Any:
    other = torch.from_dlpack(z.detach().clone())  # type: ignore[attr-defined]
    return z - other.mean(p.dim, keepdim=True)


@torch.library.custom_op("adversary::middle", mutates_args=())
def _middle(z: Tensor, dim: int) -> Tensor:
    return z.mean(dim, keepdim=True).clone()


@_middle.register_fake
def _(z: Tensor, dim: int) -> Tensor:
    return z.mean(dim, keepdim=True)


@form("out of reach")
def custom_kernel(p: Place, z: Tensor) -> Any:
    return z - _middle(z.detach(), p.dim)


@form("out of reach")
def through_vmap(p: Place, z: Tensor) -> Any:
    return torch.func.vmap(lambda column: column - column.mean(), p.dim ^ 1, p.dim ^ 1)(z)
