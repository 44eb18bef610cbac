"""Samples that meet are found without tolerance, and honest models are left alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from tests.unit.execution.proof.nets import Body, Net, batch, hooked
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from anybatch import Engine
from anybatch.errors import NotExactError


def in_place(h: Tensor) -> Tensor:
    h = h.clone()
    h.sub_(h.mean(0))
    return h


def capacity(h: Tensor) -> Tensor:
    place = torch.cumsum((h[:, 0] > -9).long(), 0)
    return h * (place < 3).to(h.dtype).unsqueeze(1)


def compacted(h: Tensor) -> Tensor:
    selected = (h[:, 0] > -9).nonzero().squeeze(1)[:2]
    return h.index_add(0, selected, h[selected])


def ranked(h: Tensor) -> Tensor:
    return h + h[:, 0].argsort().argsort().to(h.dtype).unsqueeze(1)


MEETINGS: dict[str, tuple[Body, str]] = {
    "mean": (lambda h: h - h.mean(0), "meet in Net, in mean"),
    "deviation": (lambda h: h / h.std(0), "meet in Net, in std"),
    "standard deviation in a channel": (
        lambda h: h + h.std(0).mean().expand(len(h), 1),
        "meet in Net, in std",
    ),
    "softmax": (lambda h: h.softmax(0), "meet in Net, in _softmax"),
    "sort": (lambda h: h.sort(0).values, "meet inside the model|keep their place"),
    "cumsum": (lambda h: h.cumsum(0), "meet in Net, in cumsum"),
    "attention over samples": (
        lambda h: F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None])[0, 0],
        "meet in Net",
    ),
    "capacity": (capacity, "meet in Net, in cumsum"),
    "compaction": (compacted, "meet in Net, in slice of samples"),
    "rank": (ranked, "meet in Net|the place of a row among the samples"),
    "in place": (in_place, "meet in Net, in mean"),
    "under no_grad": (lambda h: h - h.detach().mean(0), "meet in Net, in mean"),
    "roll": (lambda h: h.roll(1, 0), "keep their place|meet in Net, in add"),
    "flip": (lambda h: h + h.flip(0), "meet in Net, in add"),
    "mixup": (lambda h: 0.5 * h + 0.5 * h[torch.randperm(len(h))], "meet in Net"),
}


@pytest.mark.parametrize("micro_batch", [1, 2, 5])
@pytest.mark.parametrize("hidden", ["bare", "gate 0", "gate 1e-9", "draws", "float32"])
@pytest.mark.parametrize("name", MEETINGS)
@pytest.mark.large(few=24)
def test_samples_that_meet_are_found_whatever_hides_them(
    name: str, hidden: str, micro_batch: int
) -> None:
    body, said = MEETINGS[name]
    gate = {"gate 0": 0.0, "gate 1e-9": 1e-9}.get(hidden)
    net, (x, y) = Net(body, gate, draws=hidden == "draws"), batch()
    dtype = torch.float32 if hidden == "float32" else torch.float64
    engine = Engine(net.to(dtype), F.cross_entropy, micro_batch=micro_batch)
    with pytest.raises(NotExactError, match=said if micro_batch == 5 else "samples|Python"):
        engine.backward(x.to(dtype), y)
    assert all(p.grad is None for p in net.parameters())


class Normalised(torch.autograd.Function):
    """Divide the gradient of all rows by its norm."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class Centred(torch.autograd.Function):
    """Take the mean over rows from the gradient."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(0)


class Exponential(torch.autograd.Function):
    """exp, with its own derivative."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].exp()


def of_a_node(hook: Callable[..., Any], *, before: bool = False) -> Body:
    def body(h: Tensor) -> Tensor:
        h = h.tanh()
        if h.grad_fn is not None:
            (h.grad_fn.register_prehook if before else h.grad_fn.register_hook)(hook)
        return h

    return body


BACKWARDS: dict[str, Body] = {
    "a hook of a node": of_a_node(lambda inputs, _: (inputs[0] - inputs[0].mean(0),)),
    "a hook before a node": of_a_node(lambda inputs: (inputs[0].flip(0),), before=True),
    "a Function that normalises": Normalised.apply,
    "a Function that centres": Centred.apply,
    "a hook in forward": hooked(lambda g: g / g.norm()),
    "a reentrant checkpoint": lambda h: checkpoint(Normalised.apply, h, use_reentrant=True),
    "a checkpoint": lambda h: checkpoint(Normalised.apply, h, use_reentrant=False),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_samples_that_meet_only_in_backward_are_found(name: str) -> None:
    net, (x, y) = Net(BACKWARDS[name]).double(), batch()
    with pytest.raises(NotExactError, match="must not meet in backward.*they meet in the backward"):
        Engine(net, F.cross_entropy, micro_batch=4).backward(x, y)


def test_a_table_whose_gradient_counts_entries_is_refused() -> None:
    net = nn.Sequential(nn.Embedding(5, 6, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(30, 3))
    x, y = torch.randint(0, 5, (11, 5)), torch.randint(0, 3, (11,))
    with pytest.raises(NotExactError, match=r"meet in 0 \(Embedding\): scale_grad_by_freq"):
        Engine(net, F.cross_entropy, micro_batch=4).backward(x, y)


def forward_gradient(h: Tensor) -> Tensor:
    with torch.enable_grad():
        return torch.autograd.grad((h**3).sum(), h, create_graph=True)[0]


HONEST: dict[str, Body] = {
    "tanh": torch.tanh,
    "a Function": Exponential.apply,
    "a linear hook": hooked(lambda g: 2 * g),
    "a linear hook of a node": of_a_node(lambda inputs, _: (2 * inputs[0],)),
    "a checkpoint": lambda h: checkpoint(torch.tanh, h, use_reentrant=False),
    "a reentrant checkpoint": lambda h: checkpoint(torch.tanh, h, use_reentrant=True),
    "a gradient in forward": forward_gradient,
    "vmap": lambda h: torch.func.vmap(torch.func.grad(lambda one: (one**3).sum()))(h),
    "tokens sorted in each sample": lambda h: h.sort(1).values,
    "a table": lambda h: h + torch.arange(8.0, dtype=h.dtype),
    "complex": lambda h: torch.fft.irfft(torch.fft.rfft(h), n=8),
    "einsum": lambda h: torch.einsum("ni,ij->nj", h, torch.eye(8, dtype=h.dtype)),
    "solve": lambda h: torch.linalg.solve(torch.eye(8, dtype=h.dtype) * 2, h.unsqueeze(-1))[..., 0],
}


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 3, 5])
@pytest.mark.parametrize("name", HONEST)
def test_honest_models_are_shown_to_be_exact(name: str, micro_batch: int) -> None:
    net, (x, y) = Net(HONEST[name]).double(), batch()
    engines: list[Engine] = []

    def run(model: nn.Module) -> Tensor:
        engines.append(Engine(model, F.cross_entropy, micro_batch=micro_batch))
        return engines[0].backward(x, y)

    assert_exact(state_after(net, run), undivided(net, F.cross_entropy, x, y))
    plan = engines[0].plan
    assert plan is not None
    assert plan.exact
    assert str(plan.exact) == "shown: each sample was followed to its own row alone, step 1"


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_sizes_that_depend_on_values_and_are_not_read_are_exact(micro_batch: int) -> None:
    def chosen(h: Tensor) -> Tensor:
        places = (h[:, 0] > 0).nonzero().squeeze(1)
        return h.index_add(0, places, h[places].tanh())

    net, (x, y) = Net(chosen).double(), batch()
    engines: list[Engine] = []

    def run(model: nn.Module) -> Tensor:
        engines.append(Engine(model, F.cross_entropy, micro_batch=micro_batch))
        return engines[0].backward(x, y)

    assert_exact(state_after(net, run), undivided(net, F.cross_entropy, x, y))
    plan = engines[0].plan
    assert plan is not None
    assert plan.exact.state == "shown"


class Views(nn.Module):
    """Batch normalisation of what `cut` makes of the batch, call by call."""

    def __init__(self, cut: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.norm, self.head, self.cut = nn.BatchNorm1d(6), nn.Linear(6, 3), cut

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.norm(part) for part in self.cut(x)]))


def equal_halves(x: Tensor) -> list[Tensor]:
    """Return both halves, as timm's SplitBatchNorm2d does."""
    assert len(x) % 2 == 0, "batch size must be evenly divisible by num_splits"
    return list(x.chunk(2))


PARTS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "two views": lambda x: list(x.chunk(2)),
    "equal halves": equal_halves,
    "by position": lambda x: [x[: len(x) // 2], x[len(x) // 2 :]],
    "even and odd": lambda x: [x[::2], x[1::2]],
}


@pytest.mark.parametrize("micro_batch", [2, 4])
@pytest.mark.parametrize("name", PARTS)
def test_batch_normalisation_of_a_part_is_refused_by_name(name: str, micro_batch: int) -> None:
    net, (x, y) = Views(PARTS[name]).double(), batch(12)
    with pytest.raises(NotExactError, match=r"norm \(BatchNorm1d\) normalises a part of it"):
        Engine(net, F.cross_entropy, micro_batch=micro_batch).backward(x, y)


def test_both_views_of_each_sample_in_one_call_are_exact() -> None:
    class Both(Views):
        def forward(self, x: Tensor) -> Tensor:
            one, other = self.norm(torch.cat([x, x.tanh()])).chunk(2)
            return self.head(one + other)

    net, (x, y) = Both(lambda x: [x]).double(), batch()
    got = state_after(net, lambda m: Engine(m, F.cross_entropy, micro_batch=4).backward(x, y))
    assert_exact(got, undivided(net, F.cross_entropy, x, y))


def test_what_one_call_leaves_for_the_next_is_refused() -> None:
    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.stored = nn.Linear(6, 3), None

        def forward(self, x: Tensor) -> Tensor:
            before, self.stored = self.stored, x.detach().mean()
            return self.head(x if before is None else x + 0 * before)

    net, (x, y) = Bank().double(), batch()
    with pytest.raises(NotExactError, match="read values that another call has stored"):
        Engine(net, F.cross_entropy, micro_batch=4).backward(x, y)


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda h: h * (1.0 if bool((h > -99).all()) else 2.0), "reads a count of the samples"),
        (lambda h: h * (1 + 0 * float(h.mean())), "reads a number of the samples"),
        (lambda h: h + 0 * float(h.detach().numpy().mean()), "reads a tensor of the samples"),
        (lambda h: h * (2.0 if torch.equal(h, h.relu()) else 1.0), "reads a count of the samples"),
        # of one sample alone: it may steer what is done with the others
        (lambda h: h * (1 + 0 * float(h[0, 0])), "reads a number of the samples"),
        (lambda h: h.relu() if int(h[-1, 0]) > 99 else h, "reads a number of the samples"),
        (lambda h: h.relu() if int(h[0].argmax()) > 99 else h, "reads a count of the samples"),
    ],
)
def test_numbers_that_python_reads_are_a_doubt(read: Body, said: str) -> None:
    net, (x, y) = Net(read).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=4)
    engine.backward(x, y)
    assert engine.plan is not None
    assert not engine.plan.exact
    assert str(engine.plan.exact).startswith(f"not shown: Python {said} in Net")


def listed(h: Tensor) -> Tensor:
    largest: float = max(map(max, h.abs().tolist()))  # type: ignore[no-untyped-call]
    return h / largest


READ: dict[str, Body] = {
    "a maximum": lambda h: h / float(h.abs().max()),
    "a list": listed,
    "an array": lambda h: h / float(h.detach().abs().numpy().max()),
    "a branch": lambda h: h.tanh() if bool(h.abs().max() > 50) else h,
    "as many entries": lambda h: h / F.one_hot(h.abs().amax(1).long()).shape[1],
}


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("name", READ)
def test_a_number_that_one_row_decides_is_found_whichever_it_is(
    name: str, micro_batch: int, row: int
) -> None:
    """Of three of the four rows most have the row that decides, of two and two one has not."""
    net, (x, y) = Net(READ[name]).double(), batch()
    x[row] *= 100
    with pytest.raises(NotExactError, match="samples must not meet inside the model"):
        Engine(net, F.cross_entropy, micro_batch=micro_batch).backward(x, y)


class Averaged(nn.Module):
    """Its loss is divided by the number of classes that there are."""

    def __init__(self, count: Callable[[Tensor], int]) -> None:
        super().__init__()
        self.first, self.count = nn.Linear(6, 3), count

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.first(x), y, reduction="sum") / self.count(y)


@pytest.mark.parametrize(
    "count",
    [
        lambda y: torch.unique(y).numel(),
        lambda y: torch.unique(y).shape[0],
        lambda y: torch.unique_consecutive(y).numel(),
        lambda y: len(torch.unique(y, dim=0)),
    ],
)
def test_a_number_of_classes_is_a_doubt(count: Callable[[Tensor], int]) -> None:
    """Each micro-batch may have as many, and all of them together more."""
    net, y = Averaged(count).double(), torch.arange(12) // 4
    engine = Engine(net, micro_batch=4)
    engine.backward((torch.randn(12, 6, dtype=torch.double), y))
    assert engine.plan is not None
    assert not engine.plan.exact


SIZES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a branch": (lambda h: h.relu() if len(h) > 8 else h, "Net calls relu for 11 samples and not"),
    "a factor": (lambda h: h * (1 / len(h)), "computes mul with 0.0909091 for 11 samples and with"),
}


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("name", SIZES)
def test_what_depends_on_the_number_of_samples_is_refused(name: str, micro_batch: int) -> None:
    body, said = SIZES[name]
    net, (x, y) = Net(body).double(), batch()
    with pytest.raises(NotExactError, match=said):
        Engine(net, F.cross_entropy, micro_batch=micro_batch).backward(x, y)


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_ghost_batches_larger_than_the_rows_looked_at_are_refused(micro_batch: int) -> None:
    net, (x, y) = Views(lambda x: list(x.split(4))).double(), batch(12)
    with pytest.raises(NotExactError, match="3 calls for 12 samples and 1 for"):
        Engine(net, F.cross_entropy, micro_batch=micro_batch).backward(x, y)


def test_what_changes_at_a_later_step_is_found_there() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.meets = nn.Linear(6, 3), False

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x - x.mean(0) if self.meets else x)

    net, (x, y) = Late().double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=4)
    for _ in range(9):
        engine.backward(x, y)
    net.meets = True
    with pytest.raises(NotExactError, match="meet in Late, in mean"):
        engine.backward(x, y)


def test_a_number_of_samples_that_is_read_where_nothing_hears_it_is_found() -> None:
    """As a function in C++ reads it, which is no function of torch."""

    def unheard(h: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return h / h.size(0)

    net, (x, y) = Net(unheard).double(), batch()
    with pytest.raises(NotExactError, match="a number that depends on how many there are"):
        Engine(net, F.cross_entropy, micro_batch=3).backward(x, y)


def seeded(h: Tensor) -> Tensor:
    torch.manual_seed(3)
    return h * torch.rand_like(h)


def seeded_between(h: Tensor) -> Tensor:
    state = torch.get_rng_state()
    found = h * torch.rand_like(h)
    torch.set_rng_state(state)
    return found + torch.rand_like(h)


COINS: dict[str, tuple[Body, str]] = {
    "a seed": (seeded, "forward seeds a generator before Net draws"),
    "a state that is put back": (seeded_between, "forward seeds a generator before Net draws"),
    "a branch": (lambda h: h if torch.rand(()) < 0.5 else h.relu(), "rand in Net draws numbers"),
    "a factor": (lambda h: h * torch.rand(()), "rand in Net draws numbers"),
    "a mask of features": (
        lambda h: h * F.dropout(torch.ones(h.shape[1])),
        "bernoulli_ in Net draws numbers",
    ),
    "a branch by random": (lambda h: h if random.random() < 0.5 else h.relu(), "forward draws"),
    "a branch by numpy": (lambda h: h if np.random.rand() < 0.5 else h.relu(), "forward draws"),
}


@pytest.mark.parametrize("name", COINS)
def test_a_draw_for_all_samples_leaves_a_doubt(name: str) -> None:
    """Each micro-batch tossed its own coin, and the plan said shown."""
    body, said = COINS[name]
    net, (x, y) = Net(body).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=4)
    engine.backward(x, y)
    assert engine.plan is not None
    assert not engine.plan.exact
    assert str(engine.plan.exact).startswith(f"not shown: {said}")


@pytest.mark.parametrize("name", COINS)
def test_a_draw_for_all_samples_is_exact_where_it_is_drawn_once(name: str) -> None:
    net, (x, y) = Net(COINS[name][0]).double(), batch()

    def seeded(step: Callable[[nn.Module], Tensor]) -> Callable[[nn.Module], Tensor]:
        def run(model: nn.Module) -> Tensor:
            random.seed(1), np.random.seed(1), torch.manual_seed(1)
            return step(model)

        return run

    engines = []

    def divided(model: nn.Module) -> Tensor:
        engines.append(Engine(model, F.cross_entropy, micro_batch=4, rng="batch"))
        return engines[0].backward(x, y)

    def undivided_loss(model: nn.Module) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert_exact(state_after(net, seeded(divided)), state_after(net, seeded(undivided_loss)))


@pytest.mark.parametrize("body", [F.dropout, lambda h: h + torch.randn_like(h)])
def test_a_draw_of_each_sample_is_shown(body: Body) -> None:
    net, (x, y) = Net(body).double(), batch()
    engine = Engine(net, F.cross_entropy, micro_batch=4)
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.exact


class MaskedBefore(nn.Module):
    """DropBlock: each pixel is kept or not, and all are scaled by the share that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        kept = (torch.rand_like(x) > 0.2).to(x.dtype)
        scaled: Tensor = self.norm(x * kept * (kept.numel() / kept.sum()))
        return scaled


@pytest.mark.parametrize("rng", ["micro_batch", "batch"])
def test_samples_that_meet_before_a_batchnorm_are_named_where_they_meet(rng: str) -> None:
    model = MaskedBefore().double()
    engine = Engine(model, nn.MSELoss(), micro_batch=3, rng=rng)
    x = torch.randn(12, 5).double()
    with pytest.raises(NotExactError, match="meet in .*in sum"):
        engine.backward(x, x)
