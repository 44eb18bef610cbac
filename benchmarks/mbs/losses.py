"""The losses people write, with uneven targets and with what they are on paper.

Each maker takes the batch size and draws targets from torch's generator. `loss_fn` is what a
person writes; `terms` is the same loss as sums and counts, empty where samples meet in it.
The makers are grouped by what a model must put out: logits of classes, of every pixel or of
every token, real values, or the embeddings of pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.mbs.problem import LossFn, Term, term

CLASSES, VALUES, SIDE, LENGTH = 5, 4, 8, 6
FULLY_IGNORED = slice(4, 8)  # the second micro-batch of four


@dataclass(frozen=True)
class Written:
    """A loss, its targets (None: it takes the outputs alone) and its terms."""

    loss_fn: LossFn
    targets: Any
    terms: tuple[Term, ...] = ()


Maker = Callable[[int], Written]


def draw_labels(
    shape: tuple[int, ...], ignore: int | None, *, ignored_rows: bool = False
) -> Tensor:
    """Labels of which later rows have more ignored ones, or only such."""
    labels = torch.randint(1, CLASSES, shape)
    if ignore is not None:
        share = torch.linspace(0.1, 0.7, shape[0]).view(-1, *[1] * (len(shape) - 1))
        labels[torch.rand(shape) < share] = ignore
        labels[0] = 1
    if ignored_rows:
        assert ignore is not None
        labels[FULLY_IGNORED] = ignore
    return labels


def _weight() -> Tensor:
    return torch.linspace(0.2, 3.0, CLASSES, dtype=torch.float64)


def cross_entropy(
    n: int,
    *shape: int,
    ignore: int | None = None,
    ignored_rows: bool = False,
    weighted: bool = False,
    smoothing: float = 0.0,
    reduction: str = "mean",
) -> Written:
    """nn.CrossEntropyLoss on labels; its mean divides by the weights of what is not ignored."""
    targets = draw_labels((n, *shape), ignore, ignored_rows=ignored_rows)
    weight = _weight() if weighted else None
    skipped = -100 if ignore is None else ignore

    def total(outputs: Tensor, labels: Tensor) -> Tensor:
        options: dict[str, Any] = {"label_smoothing": smoothing, "ignore_index": skipped}
        return functional.cross_entropy(outputs, labels, weight, reduction="sum", **options)

    def count(labels: Tensor) -> Tensor | float:
        if reduction == "sum":
            return 1.0
        counted = labels[labels != skipped]
        return len(counted) if weight is None else weight[counted].sum()

    loss_fn = nn.CrossEntropyLoss(
        weight, ignore_index=skipped, label_smoothing=smoothing, reduction=reduction
    )
    return Written(loss_fn, targets, (term(total, count),))


def _tokens(n: int, loss_fn: LossFn, total: LossFn, *, shift: int = 0) -> Written:
    targets = draw_labels((n, LENGTH), 0)
    return Written(loss_fn, targets, (term(total, lambda t: (t[:, shift:] != 0).sum()),))


def flat_tokens(n: int) -> Written:
    """Token cross-entropy through a lambda with `view`; label 0 is padding."""
    mean = partial(functional.cross_entropy, ignore_index=0)
    sums = partial(mean, reduction="sum")
    return _tokens(
        n,
        lambda o, t: mean(o.view(-1, CLASSES), t.view(-1)),
        lambda o, t: sums(o.view(-1, CLASSES), t.view(-1)),
    )


def shifted_tokens(n: int) -> Written:
    """The next token's cross-entropy: outputs and labels shifted against each other."""
    mean = partial(functional.cross_entropy, ignore_index=0)
    sums = partial(mean, reduction="sum")
    return _tokens(
        n,
        lambda o, t: mean(o[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1)),
        lambda o, t: sums(o[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1)),
        shift=1,
    )


def ctc(n: int) -> Written:
    """CTC: the mean divides each sample's loss by its target length, then by the samples."""
    lengths = 1 + torch.arange(n) % 3
    targets = (torch.randint(1, CLASSES, (n, 3)), torch.full((n,), LENGTH), lengths)

    def loss(o: Tensor, t: tuple[Tensor, Tensor, Tensor], reduction: str = "mean") -> Tensor:
        steps = o.log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(steps, t[0], t[1], t[2], reduction=reduction)

    def total(o: Tensor, t: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return (loss(o, t, "none") / t[2]).sum()

    return Written(loss, targets, (term(total, lambda t: len(t[2])),))


def plain(
    draw: Callable[[int], Any],
    loss: LossFn,
    count: Callable[[Any], Tensor | float] = Tensor.numel,
    written: LossFn | None = None,
) -> Maker:
    """A torch functional whose mean is its sum over a count, by default of the elements.

    `written` is how a person spells the mean: a module, or the functional in a lambda.
    """
    mean = written or (lambda o, t: loss(o, t, reduction="mean"))

    def make(n: int) -> Written:
        total = term(lambda o, t: loss(o, t, reduction="sum"), count)
        return Written(mean, draw(n), (total,))

    return make


def _real(n: int) -> Tensor:
    return torch.randn(n, VALUES, dtype=torch.float64) * torch.linspace(0.5, 4, n)[:, None]


def binary(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: (torch.rand(n, *shape, dtype=torch.float64) < 0.3).double()


def _signs(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: 2 * binary(*shape)(n) - 1


def _shares(size: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, size, dtype=torch.float64).softmax(-1)


def _counts(n: int) -> Tensor:
    return torch.randint(5, (n, VALUES)).double()


def _gaussian(o: Tensor, t: Tensor, reduction: str) -> Tensor:
    return functional.gaussian_nll_loss(o, t, 0.1 + o.square(), reduction=reduction)


def _kl(o: Tensor, t: Tensor, reduction: str) -> Tensor:
    return functional.kl_div(o.log_softmax(-1), t, reduction=reduction)


def _nll(o: Tensor, t: Tensor, reduction: str) -> Tensor:
    return functional.nll_loss(o.log_softmax(-1), t, ignore_index=-1, reduction=reduction)


def two_losses(n: int, *, scale: float | None = None) -> Written:
    """Two known losses with different denominators on one output, added."""
    targets = {"label": draw_labels((n,), None), "value": _real(n)}
    weight = _weight()

    def first(o: Tensor, t: Any, reduction: str = "mean") -> Tensor:
        return functional.cross_entropy(o, t["label"], weight.to(o.device), reduction=reduction)

    def second(o: Tensor, t: Any, reduction: str = "mean") -> Tensor:
        found = functional.mse_loss(o[:, :VALUES], t["value"], reduction=reduction)
        return found if scale is None else scale * found

    terms = (
        term(partial(first, reduction="sum"), lambda t: weight[t["label"]].sum()),
        term(partial(second, reduction="sum"), lambda t: t["value"].numel()),
    )
    return Written(lambda o, t: first(o, t) + second(o, t), targets, terms)


def square_mean(n: int) -> Written:
    """A mean that is not declared: anybatch traces it as a mean of values of its own."""
    total = term(lambda o, t: ((o - t) ** 2).sum(), Tensor.numel)
    return Written(lambda o, t: ((o - t) ** 2).mean(), _real(n), (total,))


def square_by_length(n: int) -> Written:
    """A sum divided by the batch size that the loss reads itself."""
    total = term(lambda o, t: ((o - t) ** 2).sum())
    return Written(lambda o, t: ((o - t) ** 2).sum() / len(o), _real(n), (total,))


def _ranking(o: Any, t: Tensor, reduction: str) -> Tensor:
    first, second = o[0].mean(1), o[1].mean(1)
    return functional.margin_ranking_loss(first, second, t, margin=0.5, reduction=reduction)


def _cosine(o: Any, t: Tensor, reduction: str) -> Tensor:
    return functional.cosine_embedding_loss(o[0], o[1], t, margin=0.1, reduction=reduction)


def triplet(n: int) -> Written:
    """nn.TripletMarginLoss on (anchor, positive, negative), without targets."""
    sums = nn.TripletMarginLoss(margin=2.0, reduction="sum")
    total = Term(lambda o, _x, _t: sums(*o), lambda _x, _t: n)
    mean = nn.TripletMarginLoss(margin=2.0)
    return Written(lambda o: mean(*o), None, (total,))


def _bce(o: Tensor, t: Tensor, reduction: str) -> Tensor:
    weight = torch.linspace(0.5, 4, t.shape[1], dtype=t.dtype, device=t.device)
    weight = weight.view(-1, *[1] * (t.dim() - 2))
    return functional.binary_cross_entropy_with_logits(o, t, pos_weight=weight, reduction=reduction)


CLASS_LOSSES: dict[str, Maker] = {
    "cross_entropy": cross_entropy,
    "ignore_index": partial(cross_entropy, ignore=-100),
    "all_ignored": partial(cross_entropy, ignore=-100, ignored_rows=True),
    "class_weights": partial(cross_entropy, weighted=True),
    "weights_and_ignore": partial(cross_entropy, weighted=True, ignore=0),
    "smoothing": partial(cross_entropy, smoothing=0.1),
    "smoothing_and_weights": partial(cross_entropy, smoothing=0.1, weighted=True),
    "sum": partial(cross_entropy, reduction="sum"),
    "probabilities": plain(_shares(CLASSES), functional.cross_entropy, len, nn.CrossEntropyLoss()),
    "nll": plain(lambda n: draw_labels((n,), -1), _nll, lambda t: (t != -1).sum()),
    "multi_margin": plain(lambda n: draw_labels((n,), None), functional.multi_margin_loss, len),
}
MAP_LOSSES: dict[str, Maker] = {
    "pixel_ignore": lambda n: cross_entropy(n, SIDE, SIDE, ignore=255),
    "pixel_all_ignored": lambda n: cross_entropy(n, SIDE, SIDE, ignore=255, ignored_rows=True),
    "pixel_weights": lambda n: cross_entropy(n, SIDE, SIDE, ignore=255, weighted=True),
    "pixel_pos_weight": plain(binary(CLASSES, SIDE, SIDE), _bce),
}
TOKEN_LOSSES: dict[str, Maker] = {
    "flat_tokens": flat_tokens,
    "shifted_tokens": shifted_tokens,
    "ctc": ctc,
}
VALUE_LOSSES: dict[str, Maker] = {
    "mse": plain(_real, functional.mse_loss, written=nn.MSELoss()),
    "l1": plain(_real, functional.l1_loss, written=nn.L1Loss()),
    "smooth_l1": plain(_real, partial(functional.smooth_l1_loss, beta=0.3)),
    "huber": plain(
        _real, partial(functional.huber_loss, delta=0.5), written=nn.HuberLoss(delta=0.5)
    ),
    "pos_weight": plain(binary(VALUES), _bce),
    "kl_div": plain(_shares(VALUES), _kl, len, lambda o, t: _kl(o, t, "batchmean")),
    "gaussian_nll": plain(_real, _gaussian),
    "poisson_nll": plain(_counts, functional.poisson_nll_loss, written=nn.PoissonNLLLoss()),
    "soft_margin": plain(_signs(VALUES), functional.soft_margin_loss, written=nn.SoftMarginLoss()),
    "hinge_embedding": plain(_signs(VALUES), functional.hinge_embedding_loss),
    "multilabel": plain(
        binary(VALUES), functional.multilabel_soft_margin_loss, len, nn.MultiLabelSoftMarginLoss()
    ),
    "square_mean": square_mean,
    "square_by_length": square_by_length,
}
SUM_LOSSES: dict[str, Maker] = {
    "two_losses": two_losses,
    "two_losses_scaled": partial(two_losses, scale=0.5),
}
PAIR_LOSSES: dict[str, Maker] = {
    "margin_ranking": plain(_signs(), _ranking),
    "cosine_embedding": plain(_signs(), _cosine),
}
