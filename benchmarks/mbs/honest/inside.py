"""Networks that return their loss: likelihoods, masked and denoising losses, costs of programs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.mbs.honest.networks import C, D, Net, T, linear, parameter, words
from benchmarks.mbs.honest.subjects import ROWS, Problem, rows, subject

GROUP = "loss inside"


def returned(model: nn.Module, inputs: Any) -> Problem:
    """A model that returns its loss."""
    return Problem(model, inputs, None, None)


def weights(*shape: int) -> Tensor:
    """Zeros and ones, of which each sample but one has some."""
    found = (torch.rand(ROWS, *shape) < 0.6).double()
    found[2] = 0.0
    return found


@subject("tags of a conditional random field", GROUP)
def _tags() -> Problem:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        scores = m.stem(x)
        total = scores[:, 0]
        for t in range(1, T):
            total = torch.logsumexp(total[:, :, None] + m.moves, 1) + scores[:, t]
        path = scores.gather(2, y[:, :, None]).sum((1, 2)) + m.moves[y[:, :-1], y[:, 1:]].sum(1)
        return (total.logsumexp(1) - path).mean()

    net = Net(body, stem=linear(6, C), moves=parameter(C, C))
    return returned(net, (rows(T, 6), torch.randint(C, (ROWS, T))))


@subject("masked autoencoder", GROUP)
def _masked() -> Problem:
    def body(m: Any, x: Tensor, hidden: Tensor) -> Any:
        visible = torch.where(hidden[..., None] > 0, m.token, x)
        lost = (m.head(m.stem(visible).tanh()) - x).square().mean(-1)
        return (lost * hidden).sum() / hidden.sum()

    net = Net(body, stem=linear(6), head=linear(D, 6), token=parameter(6))
    return returned(net, (rows(T, 6), weights(T)))


@subject("masked autoencoder, hidden by draws", GROUP, rng="batch")
def _masked_by_draws() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        hidden = (torch.rand(x.shape[:2]) < 0.5).double()
        visible = torch.where(hidden[..., None] > 0, m.token, x)
        lost = (m.head(m.stem(visible).tanh()) - x).square().mean(-1)
        return (lost * hidden).sum() / hidden.sum()

    net = Net(body, stem=linear(6), head=linear(D, 6), token=parameter(6))
    return returned(net, rows(T, 6))


@subject("denoising by draws", GROUP, rng="batch")
def _denoised() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        level, noise = torch.rand(len(x), 1), torch.randn_like(x)
        guess = m.head(torch.cat([m.stem(x * (1 - level) + noise * level), level], 1).tanh())
        return ((guess - noise).square().mean(1) / (0.1 + level[:, 0])).mean()

    return returned(Net(body, stem=linear(6), head=linear(D + 1, 6)), rows(6))


@subject("evidence lower bound", GROUP, rng="batch")
def _evidence() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        mean, spread = m.stem(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (spread / 2).exp()
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1)
        return F.mse_loss(m.head(z), x) + 0.1 * divergence.mean()

    return returned(Net(body, stem=linear(6, D), head=linear(D // 2, 6)), rows(6))


@subject("normalising flow", GROUP)
def _flow() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        one, other = x.chunk(2, 1)
        scale, shift = m.stem(one).tanh().chunk(2, 1)
        other = other * scale.exp() + shift
        prior: Any = torch.distributions.Normal(m.mean, m.scale.exp())
        likely = prior.log_prob(torch.cat([one, other], 1)).sum(1) + scale.sum(1)
        return -likely.mean()

    net = Net(body, stem=linear(3, 6), mean=parameter(6), scale=parameter(6))
    return returned(net, rows(6))


@subject("mixture of densities", GROUP)
def _mixture() -> Problem:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        share, mean, spread = m.head(m.stem(x).tanh()).chunk(3, 1)
        kinds: Any = torch.distributions.Normal(mean, spread.exp())
        each = kinds.log_prob(y[:, None])
        return -torch.logsumexp(share.log_softmax(1) + each, 1).mean()

    net = Net(body, stem=linear(6), head=linear(D, 3 * C))
    return returned(net, (rows(6), torch.randn(ROWS)))


@subject("language model, losses by a mask", GROUP)
def _language() -> Problem:
    def body(m: Any, ids: Tensor, mask: Tensor) -> Any:
        scores = m.head(m.embed(ids).cumsum(1).tanh())
        likely = scores[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        loss = -(likely * mask[:, 1:]).sum() / mask[:, 1:].sum()
        return {"loss": loss, "logits": scores}

    net = Net(body, embed=nn.Embedding(11, D), head=linear(D, 11))
    return returned(net, (words(), weights(T)))


@subject("sequence, step by step", GROUP)
def _steps() -> Problem:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        state, losses = m.first.expand(len(x), D), []
        for t in range(T):
            state = m.cell(x[:, t], state)
            losses.append(F.cross_entropy(m.head(state), y[:, t], reduction="none").mean())
        return torch.stack(losses).mean()

    net = Net(body, first=parameter(D), cell=nn.GRUCell(6, D), head=linear(D, C))
    return returned(net, (rows(T, 6), torch.randint(C, (ROWS, T))))


@subject("two views that agree", GROUP)
def _views() -> Problem:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        one, other = m.stem(x).tanh(), m.stem(y).tanh()
        both = [
            F.cosine_similarity(m.head(a), b.detach(), -1) for a, b in ((one, other), (other, one))
        ]
        return 1 - 0.5 * (both[0].mean() + both[1].mean())

    return returned(Net(body, stem=linear(6), head=linear(D, D)), (rows(6), rows(6)))


@subject("quantiles", GROUP)
def _quantiles() -> Problem:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        off = y[:, None] - m.head(m.stem(x).tanh())
        levels = torch.tensor([0.1, 0.5, 0.9])
        return torch.maximum(levels * off, (levels - 1) * off).sum() / len(x)

    return returned(Net(body, stem=linear(6), head=linear(D, 3)), (rows(6), torch.randn(ROWS)))


@subject("matching of slopes", GROUP)
def _slopes() -> Problem:
    def body(m: Any, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = m.head(m.stem(x).tanh()).sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return 0.5 * (slope + x).square().sum(1).mean()

    return returned(Net(body, stem=linear(6), head=linear(D, 1)), rows(6))


@subject("time to an event", GROUP)
def _event() -> Problem:
    def body(m: Any, x: Tensor, time: Tensor, observed: Tensor) -> Any:
        rate = F.softplus(m.head(m.stem(x).tanh()))[:, 0]
        return (rate * time - observed * rate.log()).sum() / len(x)

    net = Net(body, stem=linear(6), head=linear(D, 1))
    return returned(net, (rows(6), torch.rand(ROWS), weights()))


@subject("focal loss of its own", GROUP)
def _focal() -> Problem:
    def body(m: Any, x: Tensor, y: Tensor) -> Any:
        scores = m.stem(x)
        each = F.binary_cross_entropy_with_logits(scores, y, reduction="none")
        return (each * (1 - (-each).exp()) ** 2).mean(), scores

    net = Net(body, stem=linear(6, C))
    return returned(net, (rows(6), (torch.rand(ROWS, C) < 0.5).double()))
