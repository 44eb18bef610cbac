"""Ways to the gradient of a contrastive loss over a batch that does not fit at once.

Each is made for a pair of encoders and a micro-batch, and is then called with the rows of a batch:
it adds to ``.grad`` and returns the loss. All compute the same loss, InfoNCE at one temperature.
The package of GradCache imports itself by another name than it is installed under, so it is given
that one too.
"""

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch

Step = Callable[[Tensor, Tensor], Tensor]
TEMPERATURE = 0.05


def matrix(z: Tensor, w: Tensor) -> Tensor:
    """InfoNCE as it is written by hand, with its N x N similarities."""
    return F.cross_entropy(z @ w.T / TEMPERATURE, torch.arange(len(z), device=z.device))


def undivided(f: nn.Module, g: nn.Module, _: int) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = matrix(f(x), g(y))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


def naive(f: nn.Module, g: nn.Module, n: int) -> Step:
    """Accumulation: negatives are those of the micro-batch."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros((), dtype=next(f.parameters()).dtype)
        for a, b in zip(torch.split(x, n), torch.split(y, n), strict=True):
            loss = matrix(f(a), g(b)) * (len(a) / len(x))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    return step


def gradcache(f: nn.Module, g: nn.Module, n: int) -> Step:
    """The package of its authors."""
    package = importlib.import_module("gradcache")
    sys.modules.setdefault("grad_cache", package)
    cached = importlib.import_module("gradcache.grad_cache").GradCache(
        models=[f, g], chunk_sizes=n, loss_fn=matrix
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = cached(x, y)
        return found

    return step


class _Sentences(nn.Module):
    """An encoder as sentence-transformers calls one."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return features | {"sentence_embedding": self.encoder(features["input_ids"])}


def sentence_transformers(f: nn.Module, g: nn.Module, n: int) -> Step:
    """CachedMultipleNegativesRankingLoss, for one encoder of both."""
    assert f is g, "it has one encoder"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = importlib.import_module("sentence_transformers")
        losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    model = package.SentenceTransformer(modules=[_Sentences(f)], device="cpu")
    cached = losses.CachedMultipleNegativesRankingLoss(
        model, scale=1 / TEMPERATURE, mini_batch_size=n
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = cached([{"input_ids": x}, {"input_ids": y}], torch.empty(0))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


def pair(f: nn.Module, g: nn.Module) -> nn.Module:
    return anybatch.joint(lambda f, g, x, y: (f(x), g(y)), f, g)


def encoders(f: nn.Module, g: nn.Module, n: int) -> Step:
    """Ours, which knows that they do not meet."""
    loss = anybatch.contrastive(temperature=TEMPERATURE)
    engine = anybatch.Engine(anybatch.Encoders({"a": f, "b": g}), loss, micro_batch=n)
    return lambda x, y: engine.backward({"a": x, "b": y})


def of_engine(loss: Any) -> Callable[[nn.Module, nn.Module, int], Step]:
    def make(f: nn.Module, g: nn.Module, n: int) -> Step:
        engine = anybatch.Engine(pair(f, g), loss, micro_batch=n)
        return lambda x, y: engine.backward((x, y))

    return make


WAYS: dict[str, Callable[[nn.Module, nn.Module, int], Step]] = {
    "undivided": undivided,
    "naive": naive,
    "gradcache": gradcache,
    "sentence-transformers": sentence_transformers,
    "anybatch, matrix": of_engine(lambda out: matrix(*out)),
    "anybatch, joint": of_engine(anybatch.contrastive(temperature=TEMPERATURE)),
    "anybatch": encoders,
}
MODULES = {"gradcache": "gradcache", "sentence-transformers": "sentence_transformers"}
"""Peers, and the module that must be there."""
