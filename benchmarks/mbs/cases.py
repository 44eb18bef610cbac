"""The catalogue: every usual loss on the models it is used with, tiny and in float64.

`case.make(seed)` gives the same `Problem` for the same seed. Batches have 10 samples of
uneven size, so that no split is fair to a loop that divides by the number of micro-batches.
The tests and the exactness table run the same cases.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.mbs.coupled import COUPLED_MAPS, COUPLED_PAIRS, COUPLED_VALUES
from benchmarks.mbs.losses import (
    CLASS_LOSSES,
    CLASSES,
    LENGTH,
    MAP_LOSSES,
    PAIR_LOSSES,
    SIDE,
    SUM_LOSSES,
    TOKEN_LOSSES,
    VALUE_LOSSES,
    VALUES,
    Maker,
    triplet,
)
from benchmarks.mbs.models import LSTM, MLP, ResNet, TransformerLM, UNet
from benchmarks.mbs.problem import Problem, Term

BATCH = 10
FEATURES = 6
IGNORE = -100


@dataclass(frozen=True)
class Case:
    """A name such as `class_weights-resnet` and the maker of its problem."""

    name: str
    make: Callable[[int], Problem]


def splits(batch: int) -> dict[str, int]:
    """Micro-batch sizes by kind: even, with a ragged tail, one sample, more than there are."""
    even = max(n for n in range(1, batch) if batch % n == 0)
    ragged = max((n for n in range(2, batch // 2 + 1) if batch % n), default=batch - 1)
    return {"even": even, "ragged": ragged, "one": 1, "larger": batch + 3}


class Encoders(nn.Module):
    """One encoder per input, or the first for all: (x, y, ...) -> (z, w, ...)."""

    def __init__(self, *encoders: nn.Module) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """[n, features] each -> [n, values] each."""
        own = len(self.encoders) > 1
        return tuple(self.encoders[i if own else 0](x) for i, x in enumerate(inputs))


class Inside(nn.Module):
    """A language model that returns its own loss: a tensor, an object or a mapping."""

    def __init__(self, body: nn.Module, form: str) -> None:
        super().__init__()
        self.body, self.form = body, form

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """[n, length] each -> the mean over labels that are not ignored."""
        logits = self.body(tokens)
        loss = functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE)
        if self.form == "tensor":
            return loss
        found = {"loss": loss, "logits": logits}
        return found if self.form == "mapping" else SimpleNamespace(**found)


def _features(n: int) -> Tensor:
    return torch.randn(n, FEATURES) * torch.linspace(0.3, 2, n)[:, None]


def _images(n: int) -> Tensor:
    return torch.randn(n, 3, SIDE, SIDE) * torch.linspace(0.3, 2, n).view(-1, 1, 1, 1)


def _tokens(n: int) -> Tensor:
    return torch.randint(CLASSES, (n, LENGTH))


def _transformer() -> nn.Module:
    return TransformerLM(CLASSES, width=8, layers=1, heads=2, length=LENGTH)


def _tied() -> nn.Module:
    return TransformerLM(CLASSES, width=8, layers=1, heads=2, length=LENGTH, tied=True)


def _lstm() -> nn.Module:
    return LSTM(CLASSES, width=8, outputs=CLASSES)


Pair = tuple[Callable[[], nn.Module], Callable[[int], Any]]  # a model and its inputs
CLASSIFIERS: dict[str, Pair] = {
    "mlp": (lambda: MLP(FEATURES, 8, CLASSES), _features),
    "resnet": (lambda: ResNet(CLASSES, width=4, blocks=(1, 1)), _images),
}
REGRESSORS: dict[str, Pair] = {"mlp": (lambda: MLP(FEATURES, 8, VALUES), _features)}
MAPS: dict[str, Pair] = {"unet": (lambda: UNet(3, CLASSES, width=4, depth=2), _images)}
LANGUAGE: dict[str, Pair] = {
    "transformer": (_transformer, _tokens),
    "lstm": (_lstm, _tokens),
    "tied": (_tied, _tokens),
}
PAIRS: dict[str, Pair] = {
    "two_encoders": (
        lambda: Encoders(MLP(FEATURES, 8, VALUES), MLP(FEATURES, 8, VALUES)),
        lambda n: (_features(n), _features(n)),
    ),
    "one_encoder": (
        lambda: Encoders(ResNet(VALUES, width=4, blocks=(1, 1))),
        lambda n: (_images(n), _images(n)),
    ),
}
TRIPLES: dict[str, Pair] = {
    "one_encoder": (
        lambda: Encoders(MLP(FEATURES, 8, VALUES)),
        lambda n: (_features(n), _features(n), _features(n)),
    ),
}


def _wide(tree: Any) -> Any:
    """The same inputs in float64."""
    if isinstance(tree, Tensor):
        return tree.double() if tree.is_floating_point() else tree
    return tuple(_wide(value) for value in tree)


def _case(loss: tuple[str, Maker], model: tuple[str, Pair]) -> Case:
    (loss_name, write), (model_name, (build, draw)) = loss, model

    def make(seed: int) -> Problem:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            body, inputs, written = build().double(), _wide(draw(BATCH)), write(BATCH)
        return Problem(body, written.loss_fn, None, inputs, written.targets, BATCH, written.terms)

    return Case(f"{loss_name}-{model_name}", make)


def _counted(inputs: Any, _targets: Any) -> Tensor:
    counted: Tensor = inputs["labels"] != IGNORE
    return counted.sum()


def _declared() -> Any:
    from anybatch import Loss

    return Loss.inside(count=_counted)


def _inside(form: str, model: tuple[str, Pair]) -> Case:
    """A loss inside the model: by hand, its mean times the labels of the micro-batch."""
    name, (build, draw) = model

    def total(outputs: Any, inputs: Any, _targets: Any) -> Tensor:
        loss = outputs if form == "tensor" else None
        if loss is None:
            loss = outputs["loss"] if form == "mapping" else outputs.loss
        found: Tensor = loss * _counted(inputs, None)
        return found

    def make(seed: int) -> Problem:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            body, tokens, labels = Inside(build(), form).double(), draw(BATCH), _tokens(BATCH)
            share = torch.linspace(0, 0.9, BATCH)[:, None]
            ignored = torch.rand(BATCH, LENGTH) < share
            ignored[:, 0] = False  # each sample keeps a label: a mean of none is NaN by itself
        inputs = {"tokens": tokens, "labels": labels.masked_fill(ignored, IGNORE)}
        return Problem(body, None, _declared, inputs, None, BATCH, (Term(total, _counted),))

    return Case(f"inside_{form}-{name}", make)


CROSSED: tuple[tuple[dict[str, Maker], dict[str, Pair]], ...] = (
    (CLASS_LOSSES, CLASSIFIERS),
    (MAP_LOSSES, MAPS),
    (TOKEN_LOSSES, LANGUAGE),
    (VALUE_LOSSES, REGRESSORS),
    (SUM_LOSSES, CLASSIFIERS),
    (PAIR_LOSSES, PAIRS),
    (COUPLED_MAPS, MAPS),
    (COUPLED_VALUES, REGRESSORS),
    (COUPLED_PAIRS, PAIRS),
    ({"triplet": triplet}, TRIPLES),
)
CASES: tuple[Case, ...] = (
    *(
        _case(loss, model)
        for losses, models in CROSSED
        for loss, model in product(losses.items(), models.items())
    ),
    *(
        _inside(form, model)
        for form, model in zip(("tensor", "object", "mapping"), LANGUAGE.items(), strict=True)
    ),
)
