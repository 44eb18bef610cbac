"""What a person declares of a loss is followed: true ones are shown, and others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.data import Dataset

from anybatch import Engine, LazyBatch, Loss, coupled
from anybatch.errors import BudgetError, NotExactError
from anybatch.execution.proof.declared import RowLoss

N, CLASSES = 16, 3
SIZES = (1, 3, 4, 7)
WEIGHTS = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(N, 5, dtype=torch.float64), torch.arange(N) % CLASSES


def model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Linear(5, CLASSES).double()


def hot(y: Tensor) -> Tensor:
    return F.one_hot(y, CLASSES).double()


def each(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


def total(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="sum")


def centred(out: Tensor) -> Tensor:
    return (out - out.mean(0)).square()


class Centres(torch.autograd.Function):
    """Lets samples meet in backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


def hooked(out: Tensor, y: Tensor) -> Tensor:
    out.register_hook(lambda gradient: gradient / gradient.norm())
    return each(out, y)


class Head(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(CLASSES, CLASSES).double()

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return each(self.last(out), y)


Plain = Callable[[Tensor, Tensor], Tensor]
Both = tuple[Loss, Plain]
"""A declared loss, and what the undivided batch computes."""


def per(fn: Callable[..., Tensor]) -> Both:
    return Loss.per_sample(fn), lambda out, y: fn(out, y).mean()


def over(num: Callable[..., Tensor], den: Callable[[Tensor], Any] = len) -> Both:
    return Loss.ratio(num, den), lambda out, y: num(out, y) / den(y)


TRUE: dict[str, Callable[[], Both]] = {
    "cross entropy": lambda: per(each),
    "its sum": lambda: over(total),
    "weighted": lambda: over(
        lambda out, y: F.cross_entropy(out, y, WEIGHTS, reduction="sum"), lambda y: WEIGHTS[y].sum()
    ),
    "ignored": lambda: over(
        lambda out, y: F.cross_entropy(out, y, ignore_index=1, reduction="sum"),
        lambda y: (y != 1).sum(),
    ),
    "largest target": lambda: over(total, lambda y: y.max()),
    "squares": lambda: over(lambda out, y: F.mse_loss(out, hot(y), reduction="sum")),
    "smooth": lambda: per(lambda out, y: F.smooth_l1_loss(out, hot(y), reduction="none").mean(1)),
    "binary": lambda: over(
        lambda out, y: F.binary_cross_entropy_with_logits(out, hot(y), reduction="sum")
    ),
    "divergence": lambda: over(
        lambda out, y: F.kl_div(out.log_softmax(1), hot(y), reduction="sum")
    ),
    "gathered": lambda: per(lambda out, y: -out.log_softmax(1).gather(1, y[:, None])[:, 0]),
    "indexed": lambda: per(lambda out, y: -out.log_softmax(1)[torch.arange(len(y)), y]),
    "viewed": lambda: per(lambda out, y: each(out, y).view(len(y), -1).mean(1)),
    "margins": lambda: per(lambda out, y: F.multi_margin_loss(out, y, reduction="none")),
    "masked": lambda: over(
        lambda out, y: (each(out, y) * (y != 1)).sum(), lambda y: (y != 1).sum()
    ),
    "a module": lambda: per(Head()),
}


@pytest.mark.product
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", TRUE)
def test_what_is_true_is_shown_and_exact(name: str, size: int) -> None:
    (loss, plain), (x, y) = TRUE[name](), batch()

    def run(copied: nn.Module) -> Tensor:
        engine = Engine(copied, loss, micro_batch=size)
        found = engine.backward(x, y)
        assert engine.plan is not None
        assert engine.plan.exact.state == "shown", engine.plan.exact
        return found

    assert_exact(state_after(model(), run), undivided(model(), plain, x, y))


FALSE: dict[str, tuple[Callable[[], Both], str]] = {
    "centred": (
        lambda: per(lambda out, _: centred(out).mean(1)),
        "0 and 1 meet in the loss, in mean",
    ),
    "centred sum": (lambda: over(lambda out, _: centred(out).sum()), "meet in the loss, in mean"),
    "behind a gate of 0": (
        lambda: over(lambda out, y: total(out, y) + 0.0 * centred(out).sum()),
        "meet in the loss, in mean",
    ),
    "a mean": (lambda: over(F.cross_entropy), "meet in the loss, in nll_loss"),
    "a mean of squares": (lambda: over(lambda out, y: F.mse_loss(out, hot(y))), "other numbers"),
    "a mean of some": (lambda: over(lambda out, y: each(out, y)[y != 1].mean()), "other numbers"),
    "a norm that is detached": (
        lambda: per(lambda out, _: (out * (out / out.norm()).detach()).sum(1)),
        "meet in the loss, in linalg_vector_norm",
    ),
    "turned over": (lambda: over(lambda out, _: (out * out.flip(0)).sum()), "0 and 3 meet"),
    "divided": (lambda: per(lambda out, y: each(out, y) / len(y)), "other numbers"),
    "by many": (lambda: over(lambda out, y: total(out, y) / (len(y) + 1e6)), "other numbers"),
    "a branch": (
        lambda: over(lambda out, y: total(out, y) * (2 if len(y) > 8 else 1)),
        "any number of samples",
    ),
    "numbered": (
        lambda: over(lambda out, y: (each(out, y) * torch.arange(len(y))).sum()),
        "the place of a row",
    ),
    "a largest one": (
        lambda: over(lambda out, y: total(out, y) + out.detach().max()),
        "other numbers",
    ),
    "in backward": (
        lambda: over(lambda out, y: total(Centres.apply(out), y)),
        "meet in the loss, in mean",
    ),
    "weights that targets have": (
        lambda: per(lambda out, y: each(out, y) / y.bincount(minlength=3)[y]),
        "meet in the loss, in bincount",
    ),
    "a mean of some times their count": (
        lambda: over(lambda out, y: F.cross_entropy(out, y, ignore_index=1) * (y != 1).sum()),
        "meet in the loss, in sum",
    ),
    "a hook": (lambda: per(hooked), "meet in the loss, in linalg_vector_norm"),
}


@pytest.mark.product
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FALSE)
def test_what_is_not_true_is_refused(name: str, size: int) -> None:
    make, why = FALSE[name]
    with pytest.raises(NotExactError, match=f"{why}.*without a declaration"):
        Engine(model(), make()[0], micro_batch=size).backward(*batch())


DOUBTED: dict[str, tuple[Callable[[], Both], str]] = {
    "a mean times a count": (
        lambda: over(lambda out, y: F.cross_entropy(out, y) * len(y)),
        "takes a mean over the targets that count",
    ),
    "draws": (lambda: per(lambda out, y: each(F.dropout(out, 0.0), y) * torch.rand(())), "draws"),
    "normalises": (
        lambda: per(lambda out, y: each(F.batch_norm(out, None, None, training=True), y)),
        "normalises the batch",
    ),
    "coupled": (
        lambda: per(lambda out, y: each(out, y) + coupled(lambda p: centred(p).sum())(out)),
        "coupled",
    ),
    "as many as there are": (
        lambda: per(lambda out, y: each(out, y) * torch.ones(N, dtype=torch.float64)[: len(y)]),
        "",
    ),
}


@pytest.mark.parametrize("name", DOUBTED)
def test_what_cannot_be_decided_is_not_shown(name: str) -> None:
    make, why = DOUBTED[name]
    (loss, plain), (x, y) = make(), batch()

    def run(copied: nn.Module) -> Tensor:
        engine = Engine(copied, loss, micro_batch=4)
        found = engine.backward(x, y)
        assert engine.plan is not None
        assert not engine.plan.exact or not why
        assert why in str(engine.plan.exact)
        return found

    got = state_after(model(), run)
    if name != "draws":
        assert_exact(got, undivided(model(), plain, x, y))


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("whole", [False, True])
def test_a_number_that_one_row_decides_is_refused_whichever_it_is(whole: bool, row: int) -> None:
    def scaled(out: Tensor, y: Tensor) -> Tensor:
        found = each(out, y) * float(out.detach().abs().max())
        return found.sum() if whole else found

    x, y = batch()
    x[row] *= 100
    loss = Loss.ratio(scaled, len) if whole else Loss.per_sample(scaled)
    with pytest.raises(NotExactError, match="the same loss with any other samples"):
        Engine(model(), loss, micro_batch=4).backward(x, y)


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


BY_BUDGET: dict[str, tuple[Loss, bool]] = {
    "a sum": (Loss.per_sample(entropy), True),
    "a ratio": (Loss.ratio(lambda o, y: entropy(o, y).sum(), lambda y: (y > 0).sum()), True),
    "centred": (Loss.per_sample(lambda o, y: entropy(o - o.mean(0), y)), False),
    "a factor": (Loss.per_sample(lambda o, y: entropy(o, y) * len(o)), False),
    "weights": (
        Loss.per_sample(lambda o, y: entropy(o, y) / torch.bincount(y, minlength=5)[y]),
        False,
    ),
    "a mean": (Loss.ratio(lambda o, y: entropy(o, y).mean(), lambda y: len(y)), False),
    "neighbours": (Loss.ratio(lambda o, _: o.diff(dim=0).square().sum(), lambda y: len(y)), False),
}


@pytest.mark.large(few=4)
@pytest.mark.parametrize("name", BY_BUDGET)
@pytest.mark.parametrize("wide", [5, 200])
def test_a_declaration_is_checked_within_a_budget(name: str, wide: int) -> None:
    loss, true = BY_BUDGET[name]
    x, y = torch.randn(400, 6).double(), torch.arange(400) % 5
    with pytest.raises(BudgetError) as few:
        Engine(nn.Linear(6, wide).double(), loss, memory=1, cache=None).backward(x, y)
    budget = 6 * few.value.needed
    engine = Engine(nn.Linear(6, wide).double(), loss, memory=budget, cache=None)
    if not true:
        with pytest.raises(NotExactError, match="declared"):
            engine.backward(x, y)
        return
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.mechanism == "streaming"
    assert engine.plan.exact, engine.plan.exact
    assert engine.last.peak_bytes is not None
    assert engine.last.peak_bytes <= budget


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are loaded one by one."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        if at >= N:
            raise IndexError(at)
        x, y = batch()
        return x[at], y[at]


@pytest.mark.parametrize(
    ("make", "shown"), [(lambda: per(each), True), (lambda: over(total), False)]
)
def test_a_count_of_samples_that_are_loaded_later_is_believed(
    make: Callable[[], Both], shown: bool
) -> None:
    engine = Engine(model(), make()[0], micro_batch=4)
    engine.backward(LazyBatch(Pairs()))
    assert engine.plan is not None
    assert bool(engine.plan.exact) == shown
    assert shown or "declaration of the loss is trusted" in str(engine.plan.exact)


def test_a_loss_is_called_as_without_an_inspection() -> None:
    calls = list[int]()

    def counted(out: Tensor, y: Tensor) -> Tensor:
        calls.append(len(y))
        return each(out, y)

    x, y = batch()
    Engine(model(), per(counted)[0], micro_batch=4).backward(x, y)
    assert calls == [N] or calls == [4, 4, 4, 4]


def scaled(here: Callable[[int], bool], factor: float = 2.0) -> dict[str, Both]:
    """Return declared losses that are others for some numbers of rows."""

    def by(out: Tensor) -> float:
        return factor if here(len(out)) else 1.0

    return {
        "per_sample": per(lambda out, y: each(out, y) * by(out)),
        "ratio": over(lambda out, y: total(out, y) * by(out)),
    }


def rows_of(count: int) -> tuple[Tensor, Tensor]:
    x, y = batch()
    some = torch.arange(count) % N
    return x[some], y[some]


@pytest.mark.parametrize("variant", ["per_sample", "ratio"])
@pytest.mark.parametrize(
    ("here", "count"), [(lambda n: n > 20, 25), (lambda n: n == 5, 13), (lambda n: n in (9, 5), 9)]
)
def test_a_batch_of_a_new_size_is_compared(
    variant: str, here: Callable[[int], bool], count: int
) -> None:
    size = 8 if count == 13 else 4
    net = model()
    engine = Engine(net, scaled(here)[variant][0], micro_batch=size)
    for _ in range(2):
        engine.backward(*batch())
        assert engine.plan is not None
        assert engine.plan.exact
    with pytest.raises(NotExactError, match="computes? .*the same for any number of samples"):
        engine.backward(*rows_of(count))


@pytest.mark.parametrize(("count", "size"), [(N, 1), (13, 4)])
def test_what_is_another_for_one_row_is_not_shown(count: int, size: int) -> None:
    engine = Engine(model(), scaled(lambda n: n == 1)["per_sample"][0], micro_batch=size)
    engine.backward(*rows_of(count))
    assert engine.plan is not None
    assert not engine.plan.exact
    assert "otherwise for one sample" in str(engine.plan.exact)


@pytest.mark.parametrize("name", TRUE)
def test_what_is_true_is_shown_at_new_sizes_too(name: str) -> None:
    loss, _ = TRUE[name]()
    engine = Engine(model(), loss, micro_batch=4)
    for count in (N, N, 13, 25):
        engine.backward(*rows_of(count))
        assert engine.plan is not None
        assert engine.plan.exact, engine.plan.exact


LATER = torch.cat((torch.ones(6), torch.full((N - 6,), 2.0))).double()
"""A constant whose first entries are alike, as the few rows are that are followed."""

CUT: dict[str, Callable[[int], Tensor]] = {
    "a slice": lambda n: LATER[:n],
    "narrow": lambda n: LATER.narrow(0, 0, n),
    "split": lambda n: LATER.split(n)[0],
    "a slice at the end": lambda n: LATER.flip(0)[N - n :].flip(0),
    "joined": lambda n: torch.cat((LATER, LATER))[:n],
}


@pytest.mark.product
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", ["per_sample", "ratio"])
@pytest.mark.parametrize("name", CUT)
def test_a_constant_that_is_cut_to_the_rows_is_refused(name: str, variant: str, size: int) -> None:
    def by(out: Tensor, y: Tensor) -> Tensor:
        return each(out, y) * CUT[name](len(out))

    loss = {"per_sample": per(by), "ratio": over(lambda out, y: by(out, y).sum())}[variant][0]
    engine = Engine(model(), loss, micro_batch=size)
    try:
        engine.backward(*batch())
    except NotExactError as error:
        assert "without a declaration" in str(error)  # noqa: PT017 - some are not shown instead
        return
    assert engine.plan is not None
    assert not engine.plan.exact


def test_a_loss_that_is_remembered_holds_no_outputs() -> None:
    outputs = torch.randn(1000, 3)
    bytes_of_outputs = StorageWeakRef(outputs.untyped_storage())  # type: ignore[no-untyped-call]
    loss = RowLoss(lambda out, _micro: out.sum(1), outputs, [0])
    del outputs
    assert bytes_of_outputs.expired()  # type: ignore[no-untyped-call]
    assert loss([torch.ones(2, 3)], None).tolist() == [3.0, 3.0]
