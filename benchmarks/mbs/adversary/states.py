"""Couplings through state: on the model, on the loss, between the two, and outside of both.

The honest twin of each reads a number that the training loop has set.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.mbs.adversary.forms import GLOBAL, Place, form


def _loop(p: Place, z: Tensor) -> Any:
    return z * (1 + 0.2 * p.phase)


@form("state of the model")
def calls(p: Place, z: Tensor) -> Any:
    if p.honest:
        return _loop(p, z)
    p.cache = (p.cache or 0) + 1
    return z * (1 + 0.2 * p.cache)


@form("state of the model")
def bank(p: Place, z: Tensor) -> Any:
    if p.honest:
        return _loop(p, z)
    last = 0 if p.cache is None else p.cache
    p.cache = z.detach().mean(0)
    return z - last


@form("state of the model")
def queue(p: Place, z: Tensor) -> Any:
    if p.honest:
        return _loop(p, z)
    p.cache = [*(p.cache or []), z.detach()][-3:]
    return z - torch.cat(p.cache).mean(0)


def _centre(p: Place, width: int) -> None:
    p.register_buffer("centre", torch.zeros(width))


@form("state of the model", prepare=_centre)
def moving_centre(p: Place, z: Tensor) -> Any:
    if not p.honest:
        p.centre.mul_(0.5).add_(z.detach().mean(0), alpha=0.5)
    return _loop(p, z) - p.centre


@form("state of the model", prepare=_centre)
def moving_centre_after(p: Place, z: Tensor) -> Any:
    rows = _loop(p, z) - p.centre
    if not p.honest:
        p.centre = 0.5 * p.centre + 0.5 * z.detach().mean(0)
    return rows


def _rows(p: Place, width: int) -> None:
    p.register_buffer("rows", torch.zeros(16, width))
    p.register_buffer("at", torch.zeros((), dtype=torch.long))


@form("state of the model", prepare=_rows)
def ring_of_rows(p: Place, z: Tensor) -> Any:
    found = z - p.rows.mean(0)
    if not p.honest:
        to = (torch.arange(len(z), device=z.device) + p.at) % 16
        p.rows[to] = z.detach()
        p.at.add_(len(z)).remainder_(16)
    return found


@form("state of the model")
def first_call(p: Place, z: Tensor) -> Any:
    if p.honest:
        return _loop(p, z)
    if p.cache is None:
        p.cache = z.detach().mean(0)
    return z - p.cache


@form("state of the model")
def first_call_of_a_step(p: Place, z: Tensor) -> Any:
    if p.honest:
        return _loop(p, z)
    if p.cache is None or p.cache[0] != p.phase:
        p.cache = p.phase, z.detach().mean(0)
    return z - p.cache[1]


@form("state of the model")
def running_peak(p: Place, z: Tensor) -> Any:
    if p.honest:
        return _loop(p, z)
    p.cache = max(p.cache or 0.0, float(z.detach().abs().max()))
    return z / p.cache


@form("state of the loss", in_loss=True)
def loss_calls(p: Place, out: Tensor) -> Any:
    return calls(p, out)


@form("state of the loss", in_loss=True)
def loss_bank(p: Place, out: Tensor) -> Any:
    return bank(p, out)


@form("state of the loss", in_loss=True)
def loss_queue(p: Place, out: Tensor) -> Any:
    return queue(p, out)


@form("state of the loss", in_loss=True)
def loss_peak(p: Place, out: Tensor) -> Any:
    return running_peak(p, out)


@form("state of the loss", in_loss=True)
def loss_first_call(p: Place, out: Tensor) -> Any:
    return first_call_of_a_step(p, out)


def _stashed(p: Place) -> Any:
    return p.link[0].cache if p.link else None


@form("left for the loss", in_loss=True)
def stash(p: Place, out: Tensor) -> Any:
    """The model's place leaves the deviation of its rows, a tensor."""
    return _loop(p, out) if p.honest else out / (_stashed(p)["tensor"] + 0.1)


@form("left for the loss", in_loss=True)
def stash_number(p: Place, out: Tensor) -> Any:
    return _loop(p, out) if p.honest else out / (_stashed(p)["number"] + 0.1)


@form("left for the loss", in_loss=True)
def stash_rows(p: Place, out: Tensor) -> Any:
    """The model leaves its rows, with their graph; the loss takes their mean."""
    return _loop(p, out) if p.honest else out + _stashed(p)["rows"].mean()


@form("left for the loss", in_loss=True)
def stash_length(p: Place, out: Tensor) -> Any:
    return _loop(p, out) if p.honest else out * _stashed(p)["length"] ** -0.5


@form("left for the loss", in_loss=True)
def stash_global(p: Place, out: Tensor) -> Any:
    return _loop(p, out) if p.honest else out / (GLOBAL[-1] + 0.1)


@form("left for the loss", in_loss=True)
def stash_all(p: Place, out: Tensor) -> Any:
    """The loss takes all that has been left since the run began."""
    return _loop(p, out) if p.honest else out / (torch.stack(list(GLOBAL)).sum() + 0.1)


def fill_cache(p: Place, z: Tensor) -> None:
    """Store what the loss reads in plain attributes, and in a list of the module."""
    spread = z.detach().std(correction=0)
    p.cache = {"tensor": spread, "number": float(spread), "rows": z, "length": float(len(z))}
    GLOBAL.append(spread)


@form("coupled loss", in_loss=True)
def loss_mean(p: Place, out: Tensor) -> Any:
    return out - out.mean(p.dim, keepdim=True)


@form("coupled loss", in_loss=True)
def loss_std(p: Place, out: Tensor) -> Any:
    return out / (out.detach().var(p.dim, correction=0, keepdim=True) + 0.1).sqrt()


@form("coupled loss", in_loss=True)
def loss_norm(p: Place, out: Tensor) -> Any:
    return 4 * out / (out.norm(dim=1, keepdim=True) if p.honest else out.norm())


@form("coupled loss", in_loss=True)
def loss_length(p: Place, out: Tensor) -> Any:
    return out * float(out.shape[1] if p.honest else len(out)) ** -0.5


@form("coupled loss", in_loss=True, rough=True)
def loss_sort(p: Place, out: Tensor) -> Any:
    return out.sort(p.dim).values


@form("coupled loss", in_loss=True, rough=True)
def loss_bincount(p: Place, out: Tensor) -> Any:
    choice = F.one_hot(out.argmax(1), out.shape[1])
    return out + (choice if p.honest else choice.sum(0)).to(out.dtype) / 4


@form("coupled loss", in_loss=True)
def loss_flip(p: Place, out: Tensor) -> Any:
    return 0.7 * out + 0.3 * out.flip(p.dim)


@form("coupled loss", in_loss=True)
def loss_item(p: Place, out: Tensor) -> Any:
    if p.honest:
        return torch.stack([row / (1 + row.detach().abs().max().item()) for row in out])
    return out / (1 + out.detach().abs().max().item())


@form("coupled loss", in_loss=True)
def loss_numpy(p: Place, out: Tensor) -> Any:
    middle = out.detach().double().cpu().numpy().mean(p.dim, keepdims=True)
    return out - 2 * torch.from_numpy(middle).to(out)


@form("coupled loss", in_loss=True)
def loss_softmax(p: Place, out: Tensor) -> Any:
    return 4 * out.softmax(p.dim)
